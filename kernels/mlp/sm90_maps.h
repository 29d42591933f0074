// The tensor maps of a layer's matrices, as the grouped products read and write them.
#ifndef KERNELS_MLP_SM90_MAPS_H_
#define KERNELS_MLP_SM90_MAPS_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/expert_mlp.h"
#include "kernels/mlp/sm90_plan.h"
#include "kernels/mlp/sm90_tensor_map.h"

namespace expertd::sm90 {

inline constexpr int64_t kBoxColumns = 64;   // 128 bytes of 16-bit elements
inline constexpr int64_t kOperandRows = 64;  // of a box that the tensor cores read
inline constexpr int64_t kWarpRows = 16;     // of a box that one warp stores

constexpr int64_t TilesOf(int64_t columns) { return (columns + kTileColumns - 1) / kTileColumns; }

class Maps {
 public:
  // `rows`: of all row matrices; what lies past them is never touched.
  Maps(const MlpConfig& config, int64_t rows) : config_(config), rows_(rows) {}

  // Matrices [rows, columns] as operands and as outputs.
  absl::StatusOr<CUtensorMap> Operand(const void* matrix, int64_t columns) const {
    return Make(matrix, {columns, rows_, 1, 1}, {kBoxColumns, kOperandRows, 1, 1});
  }
  absl::StatusOr<CUtensorMap> Rows(void* matrix, int64_t columns) const {
    return Make(matrix, {columns, rows_, 1, 1}, {kBoxColumns, kWarpRows, 1, 1});
  }
  // h and grad_h as [rows, (gate, up), I].
  absl::StatusOr<CUtensorMap> GateAndUpRows(const void* matrix, int64_t box_rows) const {
    return Make(matrix, {config_.intermediate, 2, rows_, 1}, {kBoxColumns, 1, box_rows, 1});
  }
  // W_gate_up as [L, H, (gate, up), I], and as [L, H, 2I].
  absl::StatusOr<CUtensorMap> GateAndUp(const void* matrix) const {
    return Make(matrix, {config_.intermediate, 2, config_.hidden, config_.local_experts},
                {kBoxColumns, 1, kOperandRows, 1});
  }
  absl::StatusOr<CUtensorMap> GateUpRows(const void* matrix) const {
    return Make(matrix, {2 * config_.intermediate, config_.hidden, config_.local_experts, 1},
                {kBoxColumns, kOperandRows, 1, 1});
  }
  // W_down as [L, I, H].
  absl::StatusOr<CUtensorMap> Down(const void* matrix) const {
    return Make(matrix, {config_.hidden, config_.intermediate, config_.local_experts, 1},
                {kBoxColumns, kOperandRows, 1, 1});
  }
  // f32 gradients [L, rows, columns].
  absl::StatusOr<CUtensorMap> Gradient(float* matrix, int64_t rows, int64_t columns) const {
    return MakeTensorMap({DType::kF32,
                          matrix,
                          {columns, rows, config_.local_experts, 1},
                          {kBoxColumns / 2, kWarpRows, 1, 1}});
  }

 private:
  absl::StatusOr<CUtensorMap> Make(const void* matrix, std::array<int64_t, 4> sizes,
                                   std::array<int64_t, 4> box) const {
    return MakeTensorMap({config_.token_dtype, matrix, sizes, box});
  }

  const MlpConfig& config_;
  const int64_t rows_;
};

}  // namespace expertd::sm90

#endif  // KERNELS_MLP_SM90_MAPS_H_
