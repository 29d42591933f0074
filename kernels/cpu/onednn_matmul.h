// ExpertMatmul by oneDNN: cached primitives, packed weights, padded row counts.
//
// A product of `rows` rows is run with OnednnRowClass(rows) rows; missing input rows are copied
// zeros, so no dimension is ever empty and no row past the given ones is read. Exceptions of oneDNN
// become statuses here.
#ifndef KERNELS_CPU_ONEDNN_MATMUL_H_
#define KERNELS_CPU_ONEDNN_MATMUL_H_

#include <dnnl.hpp>

#include <cstdint>
#include <map>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "kernels/cpu/byte_arena.h"
#include "kernels/cpu/expert_matmul.h"
#include "kernels/expert_mlp.h"

namespace expertd {

class OnednnMatmul final : public ExpertMatmul {
 public:
  explicit OnednnMatmul(const MlpConfig& config);

  std::string_view name() const override { return "onednn"; }
  DType operand_dtype() const override { return operand_; }
  int64_t OutRows(int64_t rows) const override;
  absl::Status UseWeights(const MlpWeights& weights) override;
  absl::Status Multiply(WeightUse use, int64_t expert, int64_t rows, const void* in,
                        float* out) override;
  absl::Status AddProduct(int64_t rows, int64_t m, int64_t n, const void* left, const void* right,
                          float* sum) override;

 private:
  struct Product {
    dnnl::matmul primitive;
    dnnl::memory::desc left;
    dnnl::memory::desc right;
    dnnl::memory::desc out;
  };
  // A weight of all experts in the layout the products want.
  struct Packed {
    std::optional<dnnl::memory::desc> layout;
    std::vector<dnnl::memory> experts;              // [L], made when first used
    std::vector<std::optional<uint64_t>> versions;  // [L] of what is packed
  };

  // The weight as stored: [k, n] in memory, or transposed.
  struct Shape {
    int64_t k;
    int64_t n;
    bool transposed;
  };
  Shape ShapeOf(WeightUse use) const;
  Product& ForwardProduct(WeightUse use, int64_t rows);
  Product& OuterProduct(int64_t rows, int64_t m, int64_t n);
  dnnl::memory& PackedWeight(WeightUse use, int64_t expert);
  void Run(Product& product, const void* left, const dnnl::memory& right, float* out);
  // `matrix` [rows, cols] itself when rows is a row class; else a copy with zero rows added.
  const void* PadRows(const void* matrix, int64_t rows, int64_t cols, ByteArena& scratch) const;

  const MlpConfig config_;
  const DType operand_;
  dnnl::engine engine_;
  dnnl::stream stream_;
  MlpWeights weights_;
  Packed packed_[4];  // by WeightUse
  // By use or -1, rows, m, n, threads: primitives keep the thread count they were made for.
  std::map<std::tuple<int, int64_t, int64_t, int64_t, int>, Product> products_;
  ByteArena left_;
  ByteArena right_;
  ByteArena converted_;
};

}  // namespace expertd

#endif  // KERNELS_CPU_ONEDNN_MATMUL_H_
