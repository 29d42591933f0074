// The five expert-parallel operations of one case through the service, beside the reference.
//
// Values are integers of at most 7 in magnitude and weights are 0.5 or 1, so that every sum of up
// to 16 weighted rows is exact in f32, f16 and bf16, in any order: results are compared for
// equality.
#ifndef TESTS_CONFORMANCE_SERVICE_PRIMITIVES_H_
#define TESTS_CONFORMANCE_SERVICE_PRIMITIVES_H_

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tests/conformance/service/service_test.h"
#include "tests/reference/ep.h"
#include "tests/reference/test_random.h"

namespace expertd::conformance {

struct PrimitiveCase {
  int64_t experts = 1;
  int64_t top_k = 1;
  int64_t hidden = 8;
  int64_t alignment = 4;
  v1::DType dtype = v1::DTYPE_F32;
};

inline v1::LayerConfig LayerOf(const PrimitiveCase& c) {
  v1::LayerConfig config = SmallLayer(c.experts, c.top_k, c.hidden, 4);
  config.set_alignment(c.alignment);
  config.set_token_dtype(c.dtype);
  return config;
}

// The case with rows as wide as the test's devices take them.
inline PrimitiveCase Fitted(const ServiceTest& test, PrimitiveCase c) {
  c.hidden = test.FitHidden(c.hidden, c.dtype);
  return c;
}

// Differs for every (rank, token) of a step when there are three columns or more.
inline double RowValue(int64_t rank, int64_t token, int64_t column, int64_t salt) {
  if (column == 0) return static_cast<double>(token % 8);
  if (column == 1) return static_cast<double>(rank % 8);
  if (column == 2) return static_cast<double>(token / 8 % 8);
  uint64_t hash = static_cast<uint64_t>(rank * 1000003 + token * 10007 + column * 101 + salt);
  hash = (hash ^ (hash >> 13)) * 0x9E3779B97F4A7C15u;
  return static_cast<double>((hash >> 33) % 15) - 7;
}

// Rows [counts[r], columns] per rank.
inline reference::PerRank UniqueRows(const std::vector<int64_t>& counts, int64_t columns,
                                     int64_t salt) {
  reference::PerRank rows;
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    std::vector<double>& values = rows.emplace_back();
    for (int64_t row = 0; row < counts[rank]; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        values.push_back(RowValue(static_cast<int64_t>(rank), row, column, salt));
      }
    }
  }
  return rows;
}

// 0.5 or 1 per row.
inline reference::PerRank HalfOrOne(const std::vector<int64_t>& counts, int64_t columns) {
  reference::PerRank rows = UniqueRows(counts, columns, 77);
  for (auto& values : rows) {
    for (size_t i = 0; i < values.size(); ++i) values[i] = (i * 7 + i / 3) % 2 == 0 ? 0.5 : 1.0;
  }
  return rows;
}

// Counts from a routing.
inline std::vector<int64_t> TokenCounts(const reference::Routing& ids, int64_t top_k) {
  std::vector<int64_t> counts;
  for (const auto& rank : ids) counts.push_back(static_cast<int64_t>(rank.size()) / top_k);
  return counts;
}

// One Prepare and the operations on its handle. A step that fails records a failure and gives
// empty results.
class Primitives {
 public:
  Primitives(testing::ServiceHarness& service, std::string layer_id, const PrimitiveCase& c,
             reference::Routing ids)
      : service_(service), layer_id_(std::move(layer_id)), case_(c), ids_(std::move(ids)) {
    layout_ = reference::Prepare({.num_experts = c.experts,
                                  .num_ranks = service.world(),
                                  .top_k = c.top_k,
                                  .alignment = c.alignment},
                                 ids_);
  }

  const reference::Layout& layout() const { return layout_; }
  const PrimitiveCase& shape() const { return case_; }
  // For a layout that capacity changes.
  void SetLayout(reference::Layout layout) { layout_ = std::move(layout); }
  std::vector<int64_t> tokens() const { return TokenCounts(ids_, case_.top_k); }
  std::vector<int64_t> rows() const {
    std::vector<int64_t> rows;
    for (const auto& rank : layout_.ranks) rows.push_back(rank.total);
    return rows;
  }
  // How many routes of a token exist.
  int64_t ValidRoutes(int64_t rank, int64_t token) const {
    int64_t valid = 0;
    for (int64_t k = 0; k < case_.top_k; ++k) {
      valid += layout_.Target(rank, token, k).state == reference::RouteState::kPlaced ? 1 : 0;
    }
    return valid;
  }

  // Prepares on all ranks and compares the counts with the reference's.
  bool Prepare() {
    std::vector<v1::PrepareRequest> requests;
    for (const auto& ids : ids_) {
      requests.emplace_back().set_layer_id(layer_id_);
      *requests.back().mutable_topk_ids() = IdTensor(ids, case_.top_k);
    }
    const auto responses = Run(std::move(requests));
    if (responses.empty()) return false;
    for (size_t rank = 0; rank < responses.size(); ++rank) {
      SCOPED_TRACE(::testing::Message() << "rank " << rank);
      const v1::PrepareResponse& response = responses[rank];
      const reference::RankLayout& want = layout_.ranks[rank];
      EXPECT_EQ(ToVector(response.tokens_per_expert()), want.tokens_per_expert);
      EXPECT_EQ(ToVector(response.padded_per_expert()), want.padded_per_expert);
      EXPECT_EQ(response.total_rows(), want.total);
      handles_.push_back(response.handle());
    }
    return true;
  }

  struct Received {
    std::vector<v1::Tensor> tokens;  // Per rank [total, H].
    reference::PerRank weights;      // Per rank [total].
  };
  Received Dispatch(const std::vector<v1::Tensor>& tokens, const reference::PerRank& weights) {
    auto requests = Requests<v1::DispatchRequest>();
    for (size_t rank = 0; rank < requests.size(); ++rank) {
      *requests[rank].mutable_tokens() = tokens[rank];
      *requests[rank].mutable_topk_weights() = WeightTensor(weights[rank], case_.top_k);
    }
    Received received;
    for (const auto& response : Run(std::move(requests))) {
      received.tokens.push_back(response.recv_tokens());
      received.weights.push_back(Values(response.recv_weights()));
    }
    return received;
  }

  reference::PerRank Combine(const reference::PerRank& z, const reference::PerRank* slot_weights) {
    auto requests = Requests<v1::CombineRequest>();
    for (size_t rank = 0; rank < requests.size(); ++rank) {
      *requests[rank].mutable_expert_output() = Rows(z[rank]);
      if (slot_weights == nullptr) continue;
      *requests[rank].mutable_slot_weights() = Vector((*slot_weights)[rank]);
    }
    reference::PerRank output;
    for (const auto& response : Run(std::move(requests))) {
      EXPECT_EQ(response.output().dtype(), case_.dtype);
      output.push_back(Values(response.output()));
    }
    return output;
  }

  reference::PerRank CombineBackward(const reference::PerRank& gy,
                                     const reference::PerRank* slot_weights) {
    auto requests = Requests<v1::CombineBackwardRequest>();
    for (size_t rank = 0; rank < requests.size(); ++rank) {
      *requests[rank].mutable_output_gradient() = Rows(gy[rank]);
      if (slot_weights == nullptr) continue;
      *requests[rank].mutable_slot_weights() = Vector((*slot_weights)[rank]);
    }
    reference::PerRank gradient;
    for (const auto& response : Run(std::move(requests))) {
      EXPECT_EQ(response.expert_output_gradient().dtype(), case_.dtype);
      gradient.push_back(Values(response.expert_output_gradient()));
    }
    return gradient;
  }

  reference::DispatchGradients DispatchBackward(const reference::PerRank& g,
                                                const reference::PerRank& gw) {
    auto requests = Requests<v1::DispatchBackwardRequest>();
    for (size_t rank = 0; rank < requests.size(); ++rank) {
      *requests[rank].mutable_recv_tokens_gradient() = Rows(g[rank]);
      *requests[rank].mutable_recv_weights_gradient() = Vector(gw[rank]);
    }
    reference::DispatchGradients gradients;
    for (const auto& response : Run(std::move(requests))) {
      EXPECT_EQ(response.tokens_gradient().dtype(), case_.dtype);
      gradients.x.push_back(Values(response.tokens_gradient()));
      gradients.weights.push_back(Values(response.topk_weights_gradient()));
    }
    return gradients;
  }

  std::vector<v1::Tensor> TokenTensors(const reference::PerRank& x) const {
    std::vector<v1::Tensor> tensors;
    for (const auto& rows : x) tensors.push_back(Rows(rows));
    return tensors;
  }

  // Slot values with NaN in the pad rows, `columns` wide.
  reference::PerRank PoisonPads(reference::PerRank rows, int64_t columns) const {
    for (size_t rank = 0; rank < rows.size(); ++rank) {
      for (size_t slot = 0; slot < layout_.ranks[rank].sources.size(); ++slot) {
        if (!layout_.ranks[rank].sources[slot].IsPad()) continue;
        for (int64_t c = 0; c < columns; ++c) {
          rows[rank][slot * static_cast<size_t>(columns) + static_cast<size_t>(c)] =
              std::numeric_limits<double>::quiet_NaN();
        }
      }
    }
    return rows;
  }

  // Dispatch, both combines and both backwards with values of `salt`, all against the reference.
  void CheckAll(int64_t salt) {
    const int64_t hidden = case_.hidden;
    const reference::PerRank x = UniqueRows(tokens(), hidden, salt);
    const reference::PerRank w = HalfOrOne(tokens(), case_.top_k);
    const reference::Received want = reference::Dispatch(layout_, hidden, x, w);
    const Received got = Dispatch(TokenTensors(x), w);
    if (got.tokens.size() != x.size()) return;
    for (size_t rank = 0; rank < x.size(); ++rank) {
      EXPECT_EQ(Values(got.tokens[rank]), want.x[rank]) << "recv_tokens of rank " << rank;
    }
    EXPECT_EQ(got.weights, want.weights);

    const reference::PerRank z = PoisonPads(UniqueRows(rows(), hidden, salt + 1), hidden);
    const reference::PerRank slot_weights = PoisonPads(want.weights, 1);
    EXPECT_EQ(Combine(z, nullptr), reference::Combine(layout_, hidden, z));
    EXPECT_EQ(Combine(z, &slot_weights), reference::Combine(layout_, hidden, z, &slot_weights));

    const reference::PerRank gy = UniqueRows(tokens(), hidden, salt + 2);
    EXPECT_EQ(CombineBackward(gy, nullptr), reference::CombineBackward(layout_, hidden, gy));
    EXPECT_EQ(CombineBackward(gy, &slot_weights),
              reference::CombineBackward(layout_, hidden, gy, &slot_weights));

    const reference::PerRank g = PoisonPads(UniqueRows(rows(), hidden, salt + 3), hidden);
    const reference::PerRank gw = PoisonPads(UniqueRows(rows(), 1, salt + 4), 1);
    const reference::DispatchGradients back = DispatchBackward(g, gw);
    const reference::DispatchGradients expected =
        reference::DispatchBackward(layout_, hidden, g, gw);
    EXPECT_EQ(back.x, expected.x);
    EXPECT_EQ(back.weights, expected.weights);
  }

 private:
  static std::vector<int64_t> ToVector(const google::protobuf::RepeatedField<int64_t>& field) {
    return std::vector<int64_t>(field.begin(), field.end());
  }
  v1::Tensor Rows(const std::vector<double>& values) const {
    return TokenTensor(case_.dtype, values, case_.hidden);
  }
  static v1::Tensor Vector(const std::vector<double>& values) {
    return client::FloatTensor(v1::DTYPE_F32, {static_cast<int64_t>(values.size())},
                               Floats(values));
  }
  template <typename Request>
  std::vector<Request> Requests() const {
    std::vector<Request> requests(handles_.size());
    for (size_t rank = 0; rank < requests.size(); ++rank) {
      requests[rank].set_handle(handles_[rank]);
    }
    return requests;
  }
  template <typename Request>
  std::vector<client::ResponseOf<Request>> Run(std::vector<Request> requests) {
    if (requests.empty()) return {};
    auto responses = service_.driver().Run(std::move(requests));
    if (responses.ok()) return *std::move(responses);
    ADD_FAILURE() << responses.status();
    return {};
  }

  testing::ServiceHarness& service_;
  const std::string layer_id_;
  const PrimitiveCase case_;
  const reference::Routing ids_;
  reference::Layout layout_;
  std::vector<uint64_t> handles_;
};

}  // namespace expertd::conformance

#endif  // TESTS_CONFORMANCE_SERVICE_PRIMITIVES_H_
