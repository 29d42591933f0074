// The training text: where it comes from, how it is split, and what a bigram model could reach.
#ifndef CLIENT_EXPERTCTL_TRAIN_CORPUS_H_
#define CLIENT_EXPERTCTL_TRAIN_CORPUS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace expertd::train {

inline constexpr char kLicenseFolder[] = "/usr/share/common-licenses";

// Every kValidationEvery-th block of kBlockBytes is validation, so that it is spread over the text.
inline constexpr int64_t kBlockBytes = 4096;
inline constexpr int64_t kValidationEvery = 10;

struct Corpus {
  // Runs of text that were contiguous. A prediction never crosses from one into another.
  std::vector<std::string> train;
  std::vector<std::string> validation;
};

// The text of `path`: a file, or every regular file below a folder in the order of their paths,
// symbolic links followed, equal contents taken once. An empty path means kLicenseFolder.
// Errors: NOT_FOUND, naming --data, when the path is missing or holds no text; INVALID_ARGUMENT
// over kMaxTextBytes.
inline constexpr int64_t kMaxTextBytes = int64_t{1} << 30;
absl::StatusOr<std::string> ReadText(const std::string& path);

// Errors: INVALID_ARGUMENT for a text too short to hold a validation block.
absl::StatusOr<Corpus> SplitText(absl::string_view text);

// At most `count` of the runs, evenly spread and in their order.
std::vector<std::string> SpreadSample(const std::vector<std::string>& runs, int64_t count);

// Conditional entropy H(next | previous) in nats per byte of the adjacent pairs inside `runs`:
//   -sum over pairs (a, b) of n(a, b) / N * ln(n(a, b) / n(a, *)),
// with n counted on these same runs. No bigram model, however it was fitted, has a lower cross
// entropy on these pairs (Gibbs' inequality). 0 when there are no pairs.
double BigramEntropy(const std::vector<std::string>& runs);

}  // namespace expertd::train

#endif  // CLIENT_EXPERTCTL_TRAIN_CORPUS_H_
