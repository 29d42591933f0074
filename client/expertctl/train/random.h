// Counter-based random numbers: value i of a stream depends on (seed, stream, i) and nothing else.
#ifndef CLIENT_EXPERTCTL_TRAIN_RANDOM_H_
#define CLIENT_EXPERTCTL_TRAIN_RANDOM_H_

#include <cstdint>

namespace expertd::train {

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection with good avalanche.
inline uint64_t Mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

inline uint64_t RandomBits(uint64_t seed, uint64_t stream, uint64_t index) {
  constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
  return Mix64(Mix64(Mix64(seed + kGolden) + stream * kGolden) + (index + 1) * kGolden);
}

// Uniform in [-1, 1), a multiple of 2^-23: exact in f32.
inline float RandomUniform(uint64_t seed, uint64_t stream, uint64_t index) {
  const int64_t bits = static_cast<int64_t>(RandomBits(seed, stream, index) >> 40);
  return static_cast<float>(bits - (int64_t{1} << 23)) * 0x1p-23f;
}

}  // namespace expertd::train

#endif  // CLIENT_EXPERTCTL_TRAIN_RANDOM_H_
