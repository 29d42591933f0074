// Reads, de-duplicates and splits the text, and counts its bigrams.
#include "client/expertctl/train/corpus.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace expertd::train {
namespace {

namespace fs = std::filesystem;

// Symbolic links to folders are not entered, so that a cycle cannot trap us; links to files count.
absl::StatusOr<std::vector<std::string>> ListFiles(const std::string& root) {
  std::vector<std::string> files;
  std::error_code error;
  if (fs::is_regular_file(root, error)) return std::vector<std::string>{root};
  fs::recursive_directory_iterator it(root, fs::directory_options::skip_permission_denied, error);
  for (; !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
    std::error_code ignored;  // A dangling link is no regular file.
    if (it->is_regular_file(ignored)) files.push_back(it->path().string());
  }
  if (error) {
    return absl::NotFoundError(absl::StrCat("cannot list ", root, ": ", error.message()));
  }
  std::sort(files.begin(), files.end());
  return files;
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  std::ostringstream content;
  if (stream.peek() != std::ifstream::traits_type::eof()) content << stream.rdbuf();
  if (!stream.is_open() || stream.bad() || content.fail()) {
    return absl::NotFoundError(absl::StrCat("cannot read ", path));
  }
  return std::move(content).str();
}

}  // namespace

absl::StatusOr<std::string> ReadText(const std::string& path) {
  const std::string root = path.empty() ? kLicenseFolder : path;
  std::error_code error;
  if (!fs::exists(root, error)) {
    return absl::NotFoundError(
        absl::StrCat("no text at ", root, "; name a file or folder of text with --data PATH"));
  }
  const absl::StatusOr<std::vector<std::string>> files = ListFiles(root);
  if (!files.ok()) return files.status();
  std::string text;
  std::set<std::string> seen;
  for (const std::string& file : *files) {
    const int64_t size = static_cast<int64_t>(fs::file_size(file, error));
    if (!error && size + static_cast<int64_t>(text.size()) > kMaxTextBytes) {
      return absl::InvalidArgumentError(absl::StrCat("the text at ", root, " is larger than ",
                                                     kMaxTextBytes,
                                                     " bytes; name less of it with --data PATH"));
    }
    absl::StatusOr<std::string> content = ReadFile(file);
    if (!content.ok()) return content.status();
    if (seen.insert(*content).second) text += *content;
  }
  if (text.empty()) {
    return absl::NotFoundError(
        absl::StrCat("no text in ", root, "; name a file or folder of text with --data PATH"));
  }
  return text;
}

absl::StatusOr<Corpus> SplitText(absl::string_view text) {
  const int64_t size = static_cast<int64_t>(text.size());
  const int64_t period = kBlockBytes * kValidationEvery;
  if (size < period) {
    return absl::InvalidArgumentError(absl::StrCat("the text has ", size, " bytes, needed are ",
                                                   period, "; name more text with --data PATH"));
  }
  Corpus corpus;
  for (int64_t start = 0; start < size; start += period) {
    const absl::string_view part = text.substr(start, period);
    corpus.train.emplace_back(part.substr(0, period - kBlockBytes));
    if (static_cast<int64_t>(part.size()) == period) {
      corpus.validation.emplace_back(part.substr(period - kBlockBytes));
    }
  }
  return corpus;
}

std::vector<std::string> SpreadSample(const std::vector<std::string>& runs, int64_t count) {
  const int64_t size = static_cast<int64_t>(runs.size());
  if (size <= count) return runs;
  std::vector<std::string> sample;
  for (int64_t i = 0; i < count; ++i) sample.push_back(runs[i * size / count]);
  return sample;
}

double BigramEntropy(const std::vector<std::string>& runs) {
  std::vector<int64_t> pairs(256 * 256, 0);
  std::vector<int64_t> firsts(256, 0);
  int64_t total = 0;
  for (const std::string& run : runs) {
    for (size_t i = 0; i + 1 < run.size(); ++i, ++total) {
      const uint8_t first = static_cast<uint8_t>(run[i]);
      ++firsts[first];
      ++pairs[first * 256 + static_cast<uint8_t>(run[i + 1])];
    }
  }
  double nats = 0;
  for (size_t i = 0; i < pairs.size(); ++i) {
    if (pairs[i] == 0) continue;
    const double n = static_cast<double>(pairs[i]);
    nats -= n * std::log(n / static_cast<double>(firsts[i / 256]));
  }
  return total == 0 ? 0 : nats / static_cast<double>(total);
}

}  // namespace expertd::train
