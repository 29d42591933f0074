// Philox4x32-10 and its mapping to uniform floats: the one source of initial weights.
//
// Random numbers: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Pure
// integer code in constexpr functions, which device code may call too (nvcc:
// --expt-relaxed-constexpr).
//
// Element i of a parameter is word i mod 4 of block i / 4 of the parameter's stream. A stream's key
// is made of the first two words of Philox((layer_key, parameter_key, 0), seed), so that 64 bits of
// seed, 64 of layer, 32 of parameter and 64 of index all count.
//
// Integer to float: the upper 24 bits of the word, less 2^23, are an integer v in [-2^23, 2^23),
// exact in f32. The value is v * (bound * 2^-23): the factor is exact (a power of two) unless bound
// is below 2^-103, so there is a single rounding, the same on every device, and v = 2^23 - 1 stays
// below bound because bound - bound * 2^-23 is at least one unit in the last place below it.
#ifndef KERNELS_OPTIM_PHILOX_H_
#define KERNELS_OPTIM_PHILOX_H_

#include <cstdint>

namespace expertd {

struct PhiloxBlock {
  uint32_t word[4];
};

struct PhiloxKey {
  uint32_t word[2];
};

// The ten rounds.
constexpr PhiloxBlock Philox4x32(PhiloxBlock counter, PhiloxKey key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(0xD2511F53u) * counter.word[0];
    const uint64_t product1 = static_cast<uint64_t>(0xCD9E8D57u) * counter.word[2];
    const PhiloxBlock next = {
        {static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key.word[0],
         static_cast<uint32_t>(product1),
         static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key.word[1],
         static_cast<uint32_t>(product0)}};
    counter = next;
    key.word[0] += 0x9E3779B9u;
    key.word[1] += 0xBB67AE85u;
  }
  return counter;
}

constexpr uint32_t LowWord(uint64_t value) { return static_cast<uint32_t>(value); }
constexpr uint32_t HighWord(uint64_t value) { return static_cast<uint32_t>(value >> 32); }

// The key of one parameter's stream.
constexpr PhiloxKey StreamKey(uint64_t seed, uint64_t layer_key, uint32_t parameter_key) {
  const PhiloxBlock mixed =
      Philox4x32(PhiloxBlock{{LowWord(layer_key), HighWord(layer_key), parameter_key, 0}},
                 PhiloxKey{{LowWord(seed), HighWord(seed)}});
  return PhiloxKey{{mixed.word[0], mixed.word[1]}};
}

// Block `block` of a stream: elements 4 * block to 4 * block + 3.
constexpr PhiloxBlock StreamBlock(PhiloxKey key, uint64_t block) {
  return Philox4x32(PhiloxBlock{{LowWord(block), HighWord(block), 0, 0}}, key);
}

// Uniform in [-bound, bound), with unit = bound * 2^-23.
constexpr float UniformFromWord(uint32_t word, float unit) {
  return static_cast<float>(static_cast<int32_t>(word >> 8) - (1 << 23)) * unit;
}

// bound * 2^-23.
constexpr float UniformUnit(float bound) { return bound * 1.1920928955078125e-7f; }

}  // namespace expertd

#endif  // KERNELS_OPTIM_PHILOX_H_
