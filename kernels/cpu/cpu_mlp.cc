// Forward, dgrad and wgrad of blocks of rows; see expert_mlp.h for the formulas.
#include "kernels/cpu/cpu_mlp.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "base/status_macros.h"
#include "kernels/cpu/activation.h"
#include "kernels/cpu/float_convert.h"

namespace expertd {
namespace {

float WeightOf(const float* recv_w, int64_t row) { return recv_w == nullptr ? 1.0f : recv_w[row]; }

}  // namespace

absl::Status CpuMlp::ForBlocks(const ExpertSegments& segments, const BlockStep& step) {
  int64_t base = 0;
  for (size_t j = 0; j < segments.counts->size(); ++j) {
    const int64_t count = (*segments.counts)[j];
    for (int64_t done = 0; done < count; done += kMatmulRows) {
      RETURN_IF_ERROR(step({.expert = static_cast<int64_t>(j),
                            .begin = base + done,
                            .rows = std::min(kMatmulRows, count - done)}));
    }
    base += (*segments.padded)[j];
  }
  return absl::OkStatus();
}

void CpuMlp::ZeroPads(const ExpertSegments& segments, int64_t cols, void* matrix) const {
  const int64_t row_bytes = cols * TokenBytes();
  int64_t base = 0;
  for (size_t j = 0; j < segments.counts->size(); ++j) {
    const int64_t begin = base + (*segments.counts)[j];
    base += (*segments.padded)[j];
    if (begin == base) continue;
    std::memset(static_cast<std::byte*>(matrix) + begin * row_bytes, 0,
                static_cast<size_t>((base - begin) * row_bytes));
  }
}

const void* CpuMlp::AsOperand(const void* matrix, const Block& block, int64_t cols,
                              ByteArena& scratch) {
  const auto* rows = static_cast<const std::byte*>(matrix) + block.begin * cols * TokenBytes();
  if (config_.token_dtype == matmul_->operand_dtype()) return rows;
  // Operands are f32 then: bf16 operands are only chosen for bf16 tokens.
  const int64_t count = block.rows * cols;
  auto* converted = scratch.ReserveArray<float>(static_cast<size_t>(count));
  RowToF32(config_.token_dtype, rows, count, converted);
  return converted;
}

void CpuMlp::StoreOperand(const float* from, int64_t count, void* to) {
  if (config_.token_dtype == matmul_->operand_dtype()) {
    return RowFromF32(config_.token_dtype, from, count, to);
  }
  auto* rounded = row_.ReserveArray<uint16_t>(static_cast<size_t>(count));
  RowFromF32(config_.token_dtype, from, count, rounded);
  RowToF32(config_.token_dtype, rounded, count, static_cast<float*>(to));
}

absl::Status CpuMlp::Forward(const MlpForwardArgs& args) {
  RETURN_IF_ERROR(matmul_->UseWeights(args.weights));
  RETURN_IF_ERROR(
      ForBlocks(args.segments, [&](const Block& block) { return ForwardBlock(args, block); }));
  if (args.h != nullptr) ZeroPads(args.segments, 2 * config_.intermediate, args.h);
  ZeroPads(args.segments, config_.hidden, args.z);
  return absl::OkStatus();
}

absl::Status CpuMlp::ForwardBlock(const MlpForwardArgs& args, const Block& block) {
  const int64_t hidden = config_.hidden;
  const int64_t inner = config_.intermediate;
  const bool early = config_.weighting == Weighting::kEarly;
  const auto operand_bytes = static_cast<int64_t>(DTypeSize(matmul_->operand_dtype()));
  auto* acc = wide_sum_.ReserveArray<float>(static_cast<size_t>(OutRows(block) * 2 * inner));
  const void* x = AsOperand(args.recv_x, block, hidden, operand_);
  RETURN_IF_ERROR(matmul_->Multiply(WeightUse::kGateUp, block.expert, block.rows, x, acc));

  std::byte* u = hidden_.Reserve(static_cast<size_t>(block.rows * inner * operand_bytes));
  auto* activated = activated_.ReserveArray<float>(static_cast<size_t>(inner));
  for (int64_t r = 0; r < block.rows; ++r) {
    float* gate = acc + r * 2 * inner;
    if (config_.gate_up_bias) {
      AddRow(DType::kF32, args.weights.gate_up_bias + block.expert * 2 * inner, 2 * inner, gate);
    }
    if (args.h != nullptr) {
      RowFromF32(config_.token_dtype, gate, 2 * inner,
                 static_cast<std::byte*>(args.h) + (block.begin + r) * 2 * inner * TokenBytes());
    }
    const float factor = early ? WeightOf(args.recv_w, block.begin + r) : 1.0f;
    ActivateRow(config_.activation, gate, gate + inner, factor, inner, activated);
    StoreOperand(activated, inner, u + r * inner * operand_bytes);
  }

  auto* z = narrow_sum_.ReserveArray<float>(static_cast<size_t>(OutRows(block) * hidden));
  RETURN_IF_ERROR(matmul_->Multiply(WeightUse::kDown, block.expert, block.rows, u, z));
  if (config_.down_bias) {
    for (int64_t r = 0; r < block.rows; ++r) {
      const float factor = early ? WeightOf(args.recv_w, block.begin + r) : 1.0f;
      AddScaledRow(DType::kF32, args.weights.down_bias + block.expert * hidden, factor, hidden,
                   z + r * hidden);
    }
  }
  RowFromF32(config_.token_dtype, z, block.rows * hidden,
             static_cast<std::byte*>(args.z) + block.begin * hidden * TokenBytes());
  return absl::OkStatus();
}

absl::Status CpuMlp::Dgrad(const MlpDgradArgs& args) {
  RETURN_IF_ERROR(matmul_->UseWeights(args.weights));
  RETURN_IF_ERROR(
      ForBlocks(args.segments, [&](const Block& block) { return DgradBlock(args, block); }));
  ZeroPads(args.segments, 2 * config_.intermediate, args.grad_h);
  ZeroPads(args.segments, config_.hidden, args.grad_recv_x);
  if (args.grad_w == nullptr) return absl::OkStatus();
  int64_t base = 0;
  for (size_t j = 0; j < args.segments.counts->size(); ++j) {
    const int64_t begin = base + (*args.segments.counts)[j];
    base += (*args.segments.padded)[j];
    std::fill(args.grad_w + begin, args.grad_w + base, 0.0f);
  }
  return absl::OkStatus();
}

absl::Status CpuMlp::DgradBlock(const MlpDgradArgs& args, const Block& block) {
  const int64_t hidden = config_.hidden;
  const int64_t inner = config_.intermediate;
  const int64_t h_bytes = 2 * inner * TokenBytes();
  const void* g = AsOperand(args.grad_out, block, hidden, operand_);
  auto* grad_u = wide_sum_.ReserveArray<float>(static_cast<size_t>(OutRows(block) * inner));
  RETURN_IF_ERROR(
      matmul_->Multiply(WeightUse::kDownTransposed, block.expert, block.rows, g, grad_u));

  // [gate, up] [2I], grad_h [2I], u [I], g [H]
  auto* row = row_.ReserveArray<float>(static_cast<size_t>(5 * inner + hidden));
  float* grad_h = row + 2 * inner;
  float* u = row + 4 * inner;
  float* g_row = row + 5 * inner;
  for (int64_t r = 0; r < block.rows; ++r) {
    const int64_t at = block.begin + r;
    RowToF32(config_.token_dtype, static_cast<const std::byte*>(args.h) + at * h_bytes, 2 * inner,
             row);
    const float* grad_u_row = grad_u + r * inner;
    ActivateRowBackward(config_.activation, {.gate = row,
                                             .up = row + inner,
                                             .grad_u = grad_u_row,
                                             .factor = WeightOf(args.recv_w, at),
                                             .count = inner,
                                             .u = u,
                                             .grad_gate = grad_h,
                                             .grad_up = grad_h + inner});
    RowFromF32(config_.token_dtype, grad_h, 2 * inner,
               static_cast<std::byte*>(args.grad_h) + at * h_bytes);
    if (args.grad_w == nullptr) continue;
    args.grad_w[at] = Dot(u, grad_u_row, inner);
    if (config_.down_bias) {
      RowToF32(config_.token_dtype,
               static_cast<const std::byte*>(args.grad_out) + at * hidden * TokenBytes(), hidden,
               g_row);
      args.grad_w[at] += Dot(args.weights.down_bias + block.expert * hidden, g_row, hidden);
    }
  }

  const void* grad_h_rows = AsOperand(args.grad_h, block, 2 * inner, hidden_);
  auto* grad_x = narrow_sum_.ReserveArray<float>(static_cast<size_t>(OutRows(block) * hidden));
  RETURN_IF_ERROR(matmul_->Multiply(WeightUse::kGateUpTransposed, block.expert, block.rows,
                                    grad_h_rows, grad_x));
  RowFromF32(config_.token_dtype, grad_x, block.rows * hidden,
             static_cast<std::byte*>(args.grad_recv_x) + block.begin * hidden * TokenBytes());
  return absl::OkStatus();
}

absl::Status CpuMlp::Wgrad(const MlpWgradArgs& args) {
  return ForBlocks(args.segments, [&](const Block& block) { return WgradBlock(args, block); });
}

absl::Status CpuMlp::WgradBlock(const MlpWgradArgs& args, const Block& block) {
  const int64_t hidden = config_.hidden;
  const int64_t inner = config_.intermediate;
  const int64_t expert = block.expert;
  const void* x = AsOperand(args.recv_x, block, hidden, operand_);
  const void* grad_h = AsOperand(args.grad_h, block, 2 * inner, hidden_);
  RETURN_IF_ERROR(matmul_->AddProduct(block.rows, hidden, 2 * inner, x, grad_h,
                                      args.gradients.gate_up + expert * hidden * 2 * inner));

  const DType operand = matmul_->operand_dtype();
  const auto operand_bytes = static_cast<int64_t>(DTypeSize(operand));
  std::byte* u = hidden_.Reserve(static_cast<size_t>(block.rows * inner * operand_bytes));
  auto* row = row_.ReserveArray<float>(static_cast<size_t>(3 * inner));
  for (int64_t r = 0; r < block.rows; ++r) {
    const int64_t at = block.begin + r;
    RowToF32(config_.token_dtype,
             static_cast<const std::byte*>(args.h) + at * 2 * inner * TokenBytes(), 2 * inner, row);
    ActivateRow(config_.activation, row, row + inner, WeightOf(args.recv_w, at), inner,
                row + 2 * inner);
    RowFromF32(operand, row + 2 * inner, inner, u + r * inner * operand_bytes);
  }
  const void* g = AsOperand(args.grad_out, block, hidden, other_operand_);
  RETURN_IF_ERROR(matmul_->AddProduct(block.rows, inner, hidden, u, g,
                                      args.gradients.down + expert * inner * hidden));

  for (int64_t r = 0; r < block.rows; ++r) {
    const int64_t at = block.begin + r;
    if (config_.gate_up_bias) {
      AddRow(config_.token_dtype,
             static_cast<const std::byte*>(args.grad_h) + at * 2 * inner * TokenBytes(), 2 * inner,
             args.gradients.gate_up_bias + expert * 2 * inner);
    }
    if (config_.down_bias) {
      AddScaledRow(config_.token_dtype,
                   static_cast<const std::byte*>(args.grad_out) + at * hidden * TokenBytes(),
                   WeightOf(args.recv_w, at), hidden, args.gradients.down_bias + expert * hidden);
    }
  }
  return absl::OkStatus();
}

}  // namespace expertd
