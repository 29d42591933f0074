// What the fuzz targets share: a check that ends the process, and bytes taken as numbers.
#ifndef TESTS_FUZZ_FUZZ_INPUT_H_
#define TESTS_FUZZ_FUZZ_INPUT_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

// Ends the process, as a fuzzer expects, when something that must hold does not.
#define FUZZ_CHECK(condition)                                                             \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                       \
    }                                                                                     \
  } while (false)

namespace expertd::fuzz {

inline std::string_view AsText(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

// Takes an input apart byte by byte; zeros once it is used up.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  bool empty() const { return size_ == 0; }
  uint8_t Byte() {
    if (size_ == 0) return 0;
    --size_;
    return *data_++;
  }
  // Mostly small, sometimes at the end of the range.
  uint64_t Number() {
    const uint8_t byte = Byte();
    return byte < 0xF0 ? byte : ~uint64_t{0} - (byte - 0xF0u);
  }
  std::string_view Rest() const { return AsText(data_, size_); }

 private:
  const uint8_t* data_;
  size_t size_;
};

}  // namespace expertd::fuzz

#endif  // TESTS_FUZZ_FUZZ_INPUT_H_
