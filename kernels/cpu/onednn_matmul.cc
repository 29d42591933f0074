// Primitives, packing and padding of onednn_matmul.h.
#include "kernels/cpu/onednn_matmul.h"

#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/float_convert.h"
#include "kernels/cpu/onednn_mlp.h"

namespace expertd {
namespace {

using dnnl::memory;
using Tag = memory::format_tag;

bool HasBf16Instructions() {
  const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  const auto bf16 = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_bf16);
  return (isa & bf16) == bf16;
}

DType ChooseOperand(const MlpConfig& config) {
  const bool bf16 = config.token_dtype == DType::kBF16 && config.weight_dtype == DType::kBF16;
  return bf16 && HasBf16Instructions() ? DType::kBF16 : DType::kF32;
}

memory::data_type DataType(DType dtype) {
  return dtype == DType::kBF16 ? memory::data_type::bf16 : memory::data_type::f32;
}

// oneDNN takes its threads from OpenMP, whose setting belongs to the calling thread. The symbol is
// looked up because a oneDNN may also be built without OpenMP; then there is nothing to set.
void ApplyCpuThreads() {
  using SetThreads = void (*)(int);
  static const auto set_threads =
      reinterpret_cast<SetThreads>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  if (set_threads != nullptr) set_threads(CpuThreads());
}

absl::Status FromException(const dnnl::error& error) {
  return Error(Reason::kInternal).Text("oneDNN: ", error.what());
}

}  // namespace

std::string OnednnNote() {
  return HasBf16Instructions() ? "" : "no bf16 instructions on this CPU: bf16 is computed in f32";
}

int64_t OnednnRowClass(int64_t rows) {
  if (rows <= 16) return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows)));
  const int64_t step =
      std::max<int64_t>(16, static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(rows))) / 8);
  return (rows + step - 1) / step * step;
}

OnednnMatmul::OnednnMatmul(const MlpConfig& config)
    : config_(config),
      operand_(ChooseOperand(config)),
      engine_(dnnl::engine::kind::cpu, 0),
      stream_(engine_) {
  for (Packed& packed : packed_) {
    packed.experts.resize(static_cast<size_t>(config.local_experts));
    packed.versions.resize(static_cast<size_t>(config.local_experts));
  }
}

int64_t OnednnMatmul::OutRows(int64_t rows) const { return OnednnRowClass(rows); }

absl::Status OnednnMatmul::UseWeights(const MlpWeights& weights) {
  if (weights.gate_up != weights_.gate_up || weights.down != weights_.down) {
    for (Packed& packed : packed_)
      std::fill(packed.versions.begin(), packed.versions.end(), std::nullopt);
  }
  weights_ = weights;
  return absl::OkStatus();
}

OnednnMatmul::Shape OnednnMatmul::ShapeOf(WeightUse use) const {
  const int64_t hidden = config_.hidden;
  const int64_t inner = config_.intermediate;
  switch (use) {
    case WeightUse::kGateUp:
      return {hidden, 2 * inner, false};
    case WeightUse::kDown:
      return {inner, hidden, false};
    case WeightUse::kGateUpTransposed:
      return {2 * inner, hidden, true};
    case WeightUse::kDownTransposed:
      return {hidden, inner, true};
  }
  return {};
}

OnednnMatmul::Product& OnednnMatmul::ForwardProduct(WeightUse use, int64_t rows) {
  const Shape shape = ShapeOf(use);
  const auto key = std::make_tuple(static_cast<int>(use), rows, shape.k, shape.n, CpuThreads());
  const auto found = products_.find(key);
  if (found != products_.end()) return found->second;
  const auto describe = [&](int64_t m, const memory::desc& right) {
    const memory::desc left({m, shape.k}, DataType(operand_), Tag::ab);
    const memory::desc out({m, shape.n}, memory::data_type::f32, Tag::ab);
    return dnnl::matmul::primitive_desc({left, right, out}, engine_);
  };
  // The layout that the largest block likes best serves all row counts.
  Packed& packed = packed_[static_cast<size_t>(use)];
  if (!packed.layout.has_value()) {
    const memory::desc any({shape.k, shape.n}, DataType(operand_), Tag::any);
    packed.layout = describe(kMatmulRows, any).weights_desc();
  }
  const auto description = describe(rows, *packed.layout);
  Product product = {dnnl::matmul(description), description.src_desc(), description.weights_desc(),
                     description.dst_desc()};
  return products_.emplace(key, std::move(product)).first->second;
}

OnednnMatmul::Product& OnednnMatmul::OuterProduct(int64_t rows, int64_t m, int64_t n) {
  const auto key = std::make_tuple(-1, rows, m, n, CpuThreads());
  const auto found = products_.find(key);
  if (found != products_.end()) return found->second;
  const memory::desc left({m, rows}, DataType(operand_), Tag::ba);
  const memory::desc right({rows, n}, DataType(operand_), Tag::ab);
  const memory::desc out({m, n}, memory::data_type::f32, Tag::ab);
  dnnl::post_ops add;
  add.append_sum(1.0f);
  dnnl::primitive_attr attributes;
  attributes.set_post_ops(add);
  const dnnl::matmul::primitive_desc description({left, right, out}, attributes, engine_);
  Product product = {dnnl::matmul(description), left, right, out};
  return products_.emplace(key, std::move(product)).first->second;
}

dnnl::memory& OnednnMatmul::PackedWeight(WeightUse use, int64_t expert) {
  const auto index = static_cast<size_t>(expert);
  Packed& packed = packed_[static_cast<size_t>(use)];
  memory& target = packed.experts[index];
  if (packed.versions[index] == weights_.version) return target;
  if (!target) target = memory(*packed.layout, engine_);

  const Shape shape = ShapeOf(use);
  const bool gate_up = use == WeightUse::kGateUp || use == WeightUse::kGateUpTransposed;
  const int64_t count = shape.k * shape.n;
  const auto* stored = static_cast<const std::byte*>(gate_up ? weights_.gate_up : weights_.down) +
                       expert * count * static_cast<int64_t>(DTypeSize(config_.weight_dtype));
  const void* values = stored;
  if (config_.weight_dtype != operand_) {
    auto* converted = converted_.ReserveArray<float>(static_cast<size_t>(count));
    RowToF32(config_.weight_dtype, stored, count, converted);
    values = converted;
  }
  const memory::desc plain({shape.k, shape.n}, DataType(operand_),
                           shape.transposed ? Tag::ba : Tag::ab);
  memory source(plain, engine_, const_cast<void*>(values));
  dnnl::reorder(source, target).execute(stream_, source, target);
  stream_.wait();
  packed.versions[index] = weights_.version;
  return target;
}

const void* OnednnMatmul::PadRows(const void* matrix, int64_t rows, int64_t cols,
                                  ByteArena& scratch) const {
  const int64_t padded = OnednnRowClass(rows);
  if (padded == rows) return matrix;
  const auto row_bytes = static_cast<size_t>(cols) * DTypeSize(operand_);
  const size_t data_bytes = static_cast<size_t>(rows) * row_bytes;
  std::byte* copy = scratch.Reserve(static_cast<size_t>(padded) * row_bytes);
  std::memcpy(copy, matrix, data_bytes);
  std::memset(copy + data_bytes, 0, static_cast<size_t>(padded - rows) * row_bytes);
  return copy;
}

void OnednnMatmul::Run(Product& product, const void* left, const memory& right, float* out) {
  product.primitive.execute(stream_,
                            {{DNNL_ARG_SRC, memory(product.left, engine_, const_cast<void*>(left))},
                             {DNNL_ARG_WEIGHTS, right},
                             {DNNL_ARG_DST, memory(product.out, engine_, out)}});
  stream_.wait();
}

absl::Status OnednnMatmul::Multiply(WeightUse use, int64_t expert, int64_t rows, const void* in,
                                    float* out) {
  try {
    ApplyCpuThreads();
    Product& product = ForwardProduct(use, OnednnRowClass(rows));
    const memory& weight = PackedWeight(use, expert);
    Run(product, PadRows(in, rows, ShapeOf(use).k, left_), weight, out);
    return absl::OkStatus();
  } catch (const dnnl::error& error) {
    return FromException(error);
  }
}

absl::Status OnednnMatmul::AddProduct(int64_t rows, int64_t m, int64_t n, const void* left,
                                      const void* right, float* sum) {
  try {
    ApplyCpuThreads();
    Product& product = OuterProduct(OnednnRowClass(rows), m, n);
    const void* padded_right = PadRows(right, rows, n, right_);
    const memory right_memory(product.right, engine_, const_cast<void*>(padded_right));
    Run(product, PadRows(left, rows, m, left_), right_memory, sum);
    return absl::OkStatus();
  } catch (const dnnl::error& error) {
    return FromException(error);
  }
}

}  // namespace expertd
