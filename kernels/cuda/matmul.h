// Matrix products by cuBLASLt: plans are chosen once per class of shapes and kept.
//
// All matrices are dense and row-major. Accumulation is in f32 and deterministic; f32 operands are
// multiplied as f32 (no TF32). Called from the device thread; any number of streams may be in use,
// each with a lane of its own: a lane is a workspace.
#ifndef KERNELS_CUDA_MATMUL_H_
#define KERNELS_CUDA_MATMUL_H_

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <compare>
#include <cstdint>
#include <map>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/handle.h"
#include "kernels/cuda/scratch.h"
#include "kernels/types.h"

namespace expertd {

enum class Transposed : uint8_t { kNo = 0, kYes };

// out [m, n] = left [m, k] @ right [k, n], added to out with `accumulate`. A transposed operand is
// stored as [k, m] or [n, k].
struct MatmulArgs {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  const void* left = nullptr;
  Transposed left_transposed = Transposed::kNo;
  const void* right = nullptr;
  Transposed right_transposed = Transposed::kNo;
  DType operand_dtype = DType::kInvalid;  // kF32, kF16 or kBF16, of both operands
  void* out = nullptr;
  DType out_dtype = DType::kInvalid;  // the operands' or kF32
  bool accumulate = false;
};

// The number of data rows that the plan for `rows` of them is chosen for: at least `rows` and 16,
// in quarter steps of powers of two. Row counts with the same one share a plan.
int64_t MatmulRowClass(int64_t rows);

class CublasMatmul {
 public:
  // Two users of lanes must not share an object.
  static absl::StatusOr<std::unique_ptr<CublasMatmul>> Create(CudaDevice& device, int64_t lanes);

  // Queues the product on `stream`. Nothing is queued when m or n is 0, nor when k is 0 and the
  // product is added. REQUIRES: k > 0 otherwise.
  absl::Status Run(const MatmulArgs& args, int64_t lane, cudaStream_t stream);

 private:
  // What a plan depends on. Rows of data vary from step to step, so their number is rounded up.
  struct Key {
    int64_t m = 0;
    int64_t n = 0;
    int64_t k = 0;
    Transposed left_transposed = Transposed::kNo;
    Transposed right_transposed = Transposed::kNo;
    DType operand_dtype = DType::kInvalid;
    DType out_dtype = DType::kInvalid;
    bool accumulate = false;
    uint32_t left_alignment = 0;
    uint32_t right_alignment = 0;
    uint32_t out_alignment = 0;
    auto operator<=>(const Key&) const = default;
  };
  struct Plan {
    MatmulDescHandle desc;
    cublasLtMatmulAlgo_t algo;
  };
  struct Layouts {
    MatmulLayoutHandle left;
    MatmulLayoutHandle right;
    MatmulLayoutHandle out;
  };

  explicit CublasMatmul(CudaDevice& device) : device_(device) {}
  static Key KeyOf(const MatmulArgs& args);
  static absl::StatusOr<Layouts> MakeLayouts(const Key& key);
  absl::StatusOr<const Plan*> FindPlan(const Key& key);
  absl::StatusOr<Plan> MakePlan(const Key& key);
  cublasStatus_t Launch(const MatmulArgs& args, const Plan& plan, const Layouts& layouts,
                        int64_t lane, cudaStream_t stream);

  CudaDevice& device_;
  CublasLtHandle handle_;
  Scratch workspace_;
  std::map<Key, Plan> plans_;
};

}  // namespace expertd

#endif  // KERNELS_CUDA_MATMUL_H_
