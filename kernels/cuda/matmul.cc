// cuBLASLt descriptors, heuristics and calls; see matmul.h.
//
// cuBLASLt works on column-major matrices. A row-major [m, n] is a column-major [n, m], so that the
// product is asked for as out^T = right^T left^T: its A is `right`, its B is `left`.
#include "kernels/cuda/matmul.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <utility>

#include "base/error.h"
#include "base/status_macros.h"
#include "kernels/cuda/status.h"

namespace expertd {
namespace {

constexpr int64_t kWorkspaceBytes = 32 << 20;
constexpr uintptr_t kMostAlignment = 256;

cudaDataType_t DataType(DType dtype) {
  if (dtype == DType::kF16) return CUDA_R_16F;
  return dtype == DType::kBF16 ? CUDA_R_16BF : CUDA_R_32F;
}

uint32_t AlignmentOf(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer) | kMostAlignment;
  return static_cast<uint32_t>(address & (~address + 1));
}

template <typename Value>
absl::Status SetPreference(const MatmulPreferenceHandle& preference,
                           cublasLtMatmulPreferenceAttributes_t attribute, Value value) {
  return CublasStatus(
      cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof(value)),
      "setting a matmul preference");
}

// A row-major [rows, cols] as cuBLASLt sees it.
absl::StatusOr<MatmulLayoutHandle> RowMajor(DType dtype, int64_t rows, int64_t cols) {
  MatmulLayoutHandle layout;
  RETURN_IF_ERROR(CublasStatus(
      cublasLtMatrixLayoutCreate(layout.receive(), DataType(dtype), static_cast<uint64_t>(cols),
                                 static_cast<uint64_t>(rows), cols),
      "describing a matrix"));
  return layout;
}

absl::StatusOr<MatmulDescHandle> MakeDesc(Transposed left, Transposed right) {
  MatmulDescHandle desc;
  RETURN_IF_ERROR(
      CublasStatus(cublasLtMatmulDescCreate(desc.receive(), CUBLAS_COMPUTE_32F, CUDA_R_32F),
                   "describing a matmul"));
  const cublasOperation_t a = right == Transposed::kYes ? CUBLAS_OP_T : CUBLAS_OP_N;
  const cublasOperation_t b = left == Transposed::kYes ? CUBLAS_OP_T : CUBLAS_OP_N;
  RETURN_IF_ERROR(CublasStatus(
      cublasLtMatmulDescSetAttribute(desc.get(), CUBLASLT_MATMUL_DESC_TRANSA, &a, sizeof(a)),
      "describing a matmul"));
  RETURN_IF_ERROR(CublasStatus(
      cublasLtMatmulDescSetAttribute(desc.get(), CUBLASLT_MATMUL_DESC_TRANSB, &b, sizeof(b)),
      "describing a matmul"));
  return desc;
}

}  // namespace

int64_t MatmulRowClass(int64_t rows) {
  if (rows <= 16) return 16;
  const auto below = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(rows - 1)));
  const int64_t step = std::max<int64_t>(below / 4, 1);
  return (rows + step - 1) / step * step;
}

absl::StatusOr<std::unique_ptr<CublasMatmul>> CublasMatmul::Create(CudaDevice& device,
                                                                   int64_t lanes) {
  RETURN_IF_ERROR(device.MakeCurrent());
  std::unique_ptr<CublasMatmul> made(new CublasMatmul(device));
  RETURN_IF_ERROR(CublasStatus(cublasLtCreate(made->handle_.receive()), "opening cuBLASLt"));
  RETURN_IF_ERROR(made->workspace_.Reserve(device, lanes * kWorkspaceBytes));
  return made;
}

CublasMatmul::Key CublasMatmul::KeyOf(const MatmulArgs& args) {
  return {.m = args.m,
          .n = args.n,
          .k = args.k,
          .left_transposed = args.left_transposed,
          .right_transposed = args.right_transposed,
          .operand_dtype = args.operand_dtype,
          .out_dtype = args.out_dtype,
          .accumulate = args.accumulate,
          .left_alignment = AlignmentOf(args.left),
          .right_alignment = AlignmentOf(args.right),
          .out_alignment = AlignmentOf(args.out)};
}

absl::StatusOr<CublasMatmul::Layouts> CublasMatmul::MakeLayouts(const Key& key) {
  const bool left_turned = key.left_transposed == Transposed::kYes;
  const bool right_turned = key.right_transposed == Transposed::kYes;
  Layouts layouts;
  ASSIGN_OR_RETURN(layouts.left, RowMajor(key.operand_dtype, left_turned ? key.k : key.m,
                                          left_turned ? key.m : key.k));
  ASSIGN_OR_RETURN(layouts.right, RowMajor(key.operand_dtype, right_turned ? key.n : key.k,
                                           right_turned ? key.k : key.n));
  ASSIGN_OR_RETURN(layouts.out, RowMajor(key.out_dtype, key.m, key.n));
  return layouts;
}

absl::StatusOr<CublasMatmul::Plan> CublasMatmul::MakePlan(const Key& key) {
  Plan plan;
  ASSIGN_OR_RETURN(plan.desc, MakeDesc(key.left_transposed, key.right_transposed));
  ASSIGN_OR_RETURN(const Layouts layouts, MakeLayouts(key));
  MatmulPreferenceHandle preference;
  RETURN_IF_ERROR(
      CublasStatus(cublasLtMatmulPreferenceCreate(preference.receive()), "matmul preference"));
  RETURN_IF_ERROR(SetPreference(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                static_cast<size_t>(kWorkspaceBytes)));
  // Partial sums of a split k are kept in f32 and added in order.
  RETURN_IF_ERROR(SetPreference(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)));
  const std::pair<cublasLtMatmulPreferenceAttributes_t, uint32_t> alignments[] = {
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.right_alignment},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.left_alignment},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.out_alignment},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.out_alignment}};
  for (const auto& [attribute, bytes] : alignments) {
    RETURN_IF_ERROR(SetPreference(preference, attribute, bytes));
  }
  cublasLtMatmulHeuristicResult_t found;
  int count = 0;
  const cublasStatus_t asked = cublasLtMatmulAlgoGetHeuristic(
      handle_.get(), plan.desc.get(), layouts.right.get(), layouts.left.get(), layouts.out.get(),
      layouts.out.get(), preference.get(), 1, &found, &count);
  if (asked != CUBLAS_STATUS_SUCCESS || count == 0) {
    return Error(Reason::kInternal)
        .Text("cuBLASLt has no plan for m ", key.m, ", n ", key.n, ", k ", key.k, ", operands ",
              DTypeName(key.operand_dtype), " aligned to ", key.left_alignment, " and ",
              key.right_alignment, " bytes, output ", DTypeName(key.out_dtype), " aligned to ",
              key.out_alignment, ": ", cublasLtGetStatusName(asked));
  }
  plan.algo = found.algo;
  return plan;
}

absl::StatusOr<const CublasMatmul::Plan*> CublasMatmul::FindPlan(const Key& key) {
  auto entry = plans_.find(key);
  if (entry == plans_.end()) {
    ASSIGN_OR_RETURN(Plan plan, MakePlan(key));
    entry = plans_.emplace(key, std::move(plan)).first;
  }
  return &entry->second;
}

cublasStatus_t CublasMatmul::Launch(const MatmulArgs& args, const Plan& plan,
                                    const Layouts& layouts, int64_t lane, cudaStream_t stream) {
  const float alpha = 1.0f;
  const float beta = args.accumulate ? 1.0f : 0.0f;
  return cublasLtMatmul(handle_.get(), plan.desc.get(), &alpha, args.right, layouts.right.get(),
                        args.left, layouts.left.get(), &beta, args.out, layouts.out.get(), args.out,
                        layouts.out.get(), &plan.algo,
                        workspace_.as<std::byte>() + lane * kWorkspaceBytes,
                        static_cast<size_t>(kWorkspaceBytes), stream);
}

absl::Status CublasMatmul::Run(const MatmulArgs& args, int64_t lane, cudaStream_t stream) {
  if (args.m == 0 || args.n == 0 || (args.k == 0 && args.accumulate)) return absl::OkStatus();
  const Key exact = KeyOf(args);
  Key key = exact;
  int64_t& rows = args.left_transposed == Transposed::kYes ? key.k : key.m;
  rows = MatmulRowClass(rows);
  ASSIGN_OR_RETURN(const Layouts layouts, MakeLayouts(exact));
  ASSIGN_OR_RETURN(const Plan* plan, FindPlan(key));
  cublasStatus_t result = Launch(args, *plan, layouts, lane, stream);
  if (result == CUBLAS_STATUS_NOT_SUPPORTED || result == CUBLAS_STATUS_INVALID_VALUE) {
    // The class's plan does not fit this very shape: choose one for it alone.
    ASSIGN_OR_RETURN(plan, FindPlan(exact));
    result = Launch(args, *plan, layouts, lane, stream);
  }
  return CublasStatus(result, "matrix product");
}

}  // namespace expertd
