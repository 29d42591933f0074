// One loop compiled for several instruction sets, chosen at run time.
//
// EXPERTD_VECTORIZED(Name, (parameters), (arguments)) defines `void Name(parameters)` that calls
// the always-inline function NameBody, compiled for AVX-512, for AVX2 and for the baseline.
// Products and sums are never contracted, so that every variant gives the same bits. (The
// compiler's own target_clones would do, but its resolvers crash under the thread sanitizer.)
#ifndef KERNELS_CPU_VECTOR_DISPATCH_H_
#define KERNELS_CPU_VECTOR_DISPATCH_H_

#include <cstdint>

namespace expertd {

enum class VectorLevel : uint8_t { kBaseline, kAvx2, kAvx512 };

inline VectorLevel DetectVectorLevel() {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return VectorLevel::kAvx512;
  }
  return __builtin_cpu_supports("avx2") ? VectorLevel::kAvx2 : VectorLevel::kBaseline;
}

inline VectorLevel CurrentVectorLevel() {
  static const VectorLevel level = DetectVectorLevel();
  return level;
}

}  // namespace expertd

#define EXPERTD_INLINE __attribute__((always_inline)) inline

#define EXPERTD_OPTIMIZED optimize("O3", "fp-contract=off", "no-trapping-math", "no-math-errno")

#define EXPERTD_VECTORIZED(Name, params, args)                                           \
  __attribute__((                                                                        \
      target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) static void \
      Name##Avx512 params {                                                              \
    Name##Body args;                                                                     \
  }                                                                                      \
  __attribute__((target("avx2"))) static void Name##Avx2 params { Name##Body args; }     \
  static void Name##Baseline params { Name##Body args; }                                 \
  void Name params {                                                                     \
    switch (::expertd::CurrentVectorLevel()) {                                           \
      case ::expertd::VectorLevel::kAvx512:                                              \
        return Name##Avx512 args;                                                        \
      case ::expertd::VectorLevel::kAvx2:                                                \
        return Name##Avx2 args;                                                          \
      case ::expertd::VectorLevel::kBaseline:                                            \
        return Name##Baseline args;                                                      \
    }                                                                                    \
  }

#endif  // KERNELS_CPU_VECTOR_DISPATCH_H_
