// A random engine whose seed is printed with every failure and taken back from EXPERTD_TEST_SEED.
//
//   TestSeed seed;
//   SCOPED_TRACE(seed.Trace());
#ifndef TESTS_SERVER_ENGINE_TEST_SEED_H_
#define TESTS_SERVER_ENGINE_TEST_SEED_H_

#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>

namespace expertd::engine {

class TestSeed {
 public:
  TestSeed() {
    const char* given = std::getenv("EXPERTD_TEST_SEED");
    seed_ = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
    random_.seed(seed_);
  }

  std::string Trace() const { return "EXPERTD_TEST_SEED=" + std::to_string(seed_); }
  // In [0, count).
  uint64_t Below(uint64_t count) { return random_() % count; }
  std::string Bytes(size_t size) {
    std::string bytes(size, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random_());
    return bytes;
  }
  // Changes one to four bytes.
  std::string Mutate(std::string bytes) {
    for (uint64_t n = 1 + Below(4); n > 0 && !bytes.empty(); --n) {
      bytes[Below(bytes.size())] = static_cast<char>(random_());
    }
    return bytes;
  }

 private:
  uint64_t seed_ = 0;
  std::mt19937_64 random_;
};

}  // namespace expertd::engine

#endif  // TESTS_SERVER_ENGINE_TEST_SEED_H_
