// Short deterministic runs of every fuzz target: its corpus, and random changes of it.
//
// EXPERTD_FUZZ_SEED repeats a run, EXPERTD_FUZZ_RUNS lengthens it. A target that finds something
// ends the process; the input is then printed as hexadecimal.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#define EXPERTD_FUZZ_TARGET(name) extern "C" int Run_##name##_fuzz(const uint8_t*, size_t)
EXPERTD_FUZZ_TARGET(arrival);
EXPERTD_FUZZ_TARGET(fields);
EXPERTD_FUZZ_TARGET(group_state);
EXPERTD_FUZZ_TARGET(join);
EXPERTD_FUZZ_TARGET(request);
EXPERTD_FUZZ_TARGET(sequence);
EXPERTD_FUZZ_TARGET(server_config);
EXPERTD_FUZZ_TARGET(status);

namespace expertd::fuzz {
namespace {

struct Target {
  const char* name;
  int (*run)(const uint8_t*, size_t);
};
void PrintTo(const Target& target, std::ostream* out) { *out << target.name; }

std::string* current_input = nullptr;  // for the signal handler

void PrintInput(int) {
  constexpr char kDigits[] = "0123456789abcdef";
  for (const char c : *current_input) {
    const auto byte = static_cast<uint8_t>(c);
    const char pair[2] = {kDigits[byte >> 4], kDigits[byte & 15]};
    if (write(STDERR_FILENO, pair, sizeof(pair)) < 0) break;
  }
  if (write(STDERR_FILENO, "\n", 1) < 0) return;
}

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

std::vector<std::string> ReadCorpus(const std::string& name) {
  const char* root = std::getenv("EXPERTD_SOURCE_DIR");
  const std::filesystem::path folder =
      std::filesystem::path(root == nullptr ? "." : root) / "tests/fuzz/corpus" / name;
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> corpus;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return corpus;
}

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  size_t Below(size_t limit) { return limit == 0 ? 0 : random_() % limit; }

  std::string Change(std::string text, const std::vector<std::string>& corpus) {
    for (size_t times = 1 + Below(4); times > 0; --times) {
      const size_t at = Below(text.size());
      switch (Below(6)) {
        case 0:
          if (!text.empty()) text[at] = static_cast<char>(text[at] ^ (1 << Below(8)));
          break;
        case 1:
          if (!text.empty()) text[at] = Special();
          break;
        case 2:
          text.insert(at, 1 + Below(8), Special());
          break;
        case 3:
          text.erase(at, 1 + Below(8));
          break;
        case 4:
          text.resize(at);
          break;
        default: {
          const std::string& other = corpus[Below(corpus.size())];
          const size_t from = Below(other.size());
          text.insert(at, other.substr(from, 1 + Below(32)));
        }
      }
    }
    return text;
  }

 private:
  char Special() {
    constexpr uint8_t kSpecial[] = {0, 1, 0x7F, 0x80, 0xFF, '0', '9', ':', '-', ','};
    return static_cast<char>(Below(2) == 0 ? kSpecial[Below(sizeof(kSpecial))] : Below(256));
  }

  std::mt19937_64 random_;
};

class FuzzTest : public ::testing::TestWithParam<Target> {};

TEST_P(FuzzTest, CorpusAndRandomChangesOfIt) {
  const std::vector<std::string> corpus = ReadCorpus(GetParam().name);
  ASSERT_FALSE(corpus.empty());
  const uint64_t seed = FromEnvironment("EXPERTD_FUZZ_SEED", 20240607);
  const uint64_t runs = FromEnvironment("EXPERTD_FUZZ_RUNS", 5000);
  std::cout << "EXPERTD_FUZZ_SEED=" << seed << " EXPERTD_FUZZ_RUNS=" << runs << ", "
            << corpus.size() << " files\n";
  std::string input;
  current_input = &input;
  auto* const before = std::signal(SIGABRT, PrintInput);
  const auto run = [&](std::string next) {
    input = std::move(next);
    EXPECT_EQ(GetParam().run(reinterpret_cast<const uint8_t*>(input.data()), input.size()), 0);
  };
  run("");
  for (const std::string& text : corpus) run(text);
  Mutator mutator(seed);
  for (uint64_t i = 0; i < runs; ++i) {
    run(mutator.Change(corpus[mutator.Below(corpus.size())], corpus));
  }
  std::signal(SIGABRT, before);
}

INSTANTIATE_TEST_SUITE_P(
    All, FuzzTest,
    ::testing::Values(Target{"arrival", Run_arrival_fuzz}, Target{"fields", Run_fields_fuzz},
                      Target{"group_state", Run_group_state_fuzz}, Target{"join", Run_join_fuzz},
                      Target{"request", Run_request_fuzz}, Target{"sequence", Run_sequence_fuzz},
                      Target{"server_config", Run_server_config_fuzz},
                      Target{"status", Run_status_fuzz}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace expertd::fuzz
