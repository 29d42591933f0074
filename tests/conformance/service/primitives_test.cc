// What each of the five expert-parallel operations promises, through the service.
#include <algorithm>
#include <string>
#include <vector>

#include "tests/conformance/service/primitives.h"

namespace expertd::conformance {
namespace {

using reference::PerRank;
using reference::TestRandom;

constexpr v1::DType kDTypes[] = {v1::DTYPE_F32, v1::DTYPE_BF16, v1::DTYPE_F16};

// Tokens that differ between ranks: 5, 6, 7, 5, ...
std::vector<int64_t> RaggedTokens(int64_t world) {
  std::vector<int64_t> tokens;
  for (int64_t rank = 0; rank < world; ++rank) tokens.push_back(5 + rank % 3);
  return tokens;
}

PrimitiveCase UsualCase(int64_t world, v1::DType dtype) {
  return {.experts = 3 * world, .top_k = 3, .hidden = 8, .alignment = 4, .dtype = dtype};
}

TEST_P(ServiceTest, PrepareCountsAndTotalAreExact) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  for (const int64_t alignment : {1, 4, 16}) {
    PrimitiveCase c = UsualCase(world(), v1::DTYPE_F32);
    c.alignment = alignment;
    const std::string layer_id = MakeLayer(LayerOf(c));
    Primitives p(service(), layer_id, c, random.Ids(RaggedTokens(world()), c.top_k, c.experts));
    p.Prepare();  // Compares.
  }
}

TEST_P(ServiceTest, DispatchCopiesAnyBitsInSlotOrder) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  for (const v1::DType dtype : kDTypes) {
    SCOPED_TRACE(v1::DType_Name(dtype));
    const PrimitiveCase c = UsualCase(world(), dtype);
    const std::string layer_id = MakeLayer(LayerOf(c));
    Primitives p(service(), layer_id, c, random.Ids(RaggedTokens(world()), c.top_k, c.experts));
    ASSERT_TRUE(p.Prepare());
    // Random bytes: NaNs with payloads, negative zeros and subnormals too.
    std::vector<v1::Tensor> tokens = p.TokenTensors(UniqueRows(p.tokens(), c.hidden, 1));
    for (v1::Tensor& tensor : tokens) {
      for (char& byte : *tensor.mutable_data()) byte = static_cast<char>(random.Integer(0, 255));
    }
    const auto got = p.Dispatch(tokens, HalfOrOne(p.tokens(), c.top_k));
    ASSERT_EQ(got.tokens.size(), tokens.size());
    const auto row_bytes = static_cast<size_t>(c.hidden * client::ElementBytes(dtype));
    for (size_t rank = 0; rank < tokens.size(); ++rank) {
      std::string want;
      for (const reference::RouteSource& source : p.layout().ranks[rank].sources) {
        want += source.IsPad() ? std::string(row_bytes, '\0')
                               : tokens[static_cast<size_t>(source.rank)].data().substr(
                                     static_cast<size_t>(source.token) * row_bytes, row_bytes);
      }
      EXPECT_EQ(got.tokens[rank].dtype(), dtype);
      EXPECT_TRUE(got.tokens[rank].data() == want) << "rank " << rank;
    }
  }
}

TEST_P(ServiceTest, DispatchPadsAreZeroWithWeightZero) {
  PrimitiveCase c = UsualCase(world(), v1::DTYPE_BF16);
  c.alignment = 16;  // More than any expert receives here: every segment has pads.
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  const std::string layer_id = MakeLayer(LayerOf(c));
  Primitives p(service(), layer_id, c, random.Ids(RaggedTokens(world()), c.top_k, c.experts));
  ASSERT_TRUE(p.Prepare());
  const auto got = p.Dispatch(p.TokenTensors(UniqueRows(p.tokens(), c.hidden, 2)),
                              HalfOrOne(p.tokens(), c.top_k));
  ASSERT_EQ(got.tokens.size(), static_cast<size_t>(world()));
  for (size_t rank = 0; rank < got.tokens.size(); ++rank) {
    const std::vector<double> rows = Values(got.tokens[rank]);
    const auto& sources = p.layout().ranks[rank].sources;
    ASSERT_EQ(rows.size(), sources.size() * static_cast<size_t>(c.hidden));
    for (size_t i = 0; i < rows.size(); ++i) {
      const size_t slot = i / static_cast<size_t>(c.hidden);
      if (!sources[slot].IsPad()) continue;
      EXPECT_EQ(rows[i], 0.0);
      EXPECT_EQ(got.weights[rank][slot], 0.0);
    }
  }
}

TEST_P(ServiceTest, CombineOfReceivedRowsGivesValidRoutesTimesTokens) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  for (const v1::DType dtype : kDTypes) {
    SCOPED_TRACE(v1::DType_Name(dtype));
    const PrimitiveCase c = UsualCase(world(), dtype);
    const std::string layer_id = MakeLayer(LayerOf(c));
    Primitives p(service(), layer_id, c, random.Ids(RaggedTokens(world()), c.top_k, c.experts));
    ASSERT_TRUE(p.Prepare());
    const PerRank x = UniqueRows(p.tokens(), c.hidden, 3);
    const auto got = p.Dispatch(p.TokenTensors(x), HalfOrOne(p.tokens(), c.top_k));
    PerRank z;
    for (const v1::Tensor& tensor : got.tokens) z.push_back(Values(tensor));
    const PerRank y = p.Combine(z, nullptr);
    PerRank want = x;
    for (size_t rank = 0; rank < want.size(); ++rank) {
      for (size_t i = 0; i < want[rank].size(); ++i) {
        want[rank][i] *= static_cast<double>(
            p.ValidRoutes(static_cast<int64_t>(rank), static_cast<int64_t>(i) / c.hidden));
      }
    }
    EXPECT_EQ(y, want);
  }
}

TEST_P(ServiceTest, WeightedCombineMultipliesByEachRoutesWeight) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  const PrimitiveCase c = UsualCase(world(), v1::DTYPE_BF16);
  const std::string layer_id = MakeLayer(LayerOf(c));
  Primitives p(service(), layer_id, c, random.Ids(RaggedTokens(world()), c.top_k, c.experts));
  ASSERT_TRUE(p.Prepare());
  const PerRank x = UniqueRows(p.tokens(), c.hidden, 4);
  const PerRank w = HalfOrOne(p.tokens(), c.top_k);
  const auto got = p.Dispatch(p.TokenTensors(x), w);
  PerRank z;
  for (const v1::Tensor& tensor : got.tokens) z.push_back(Values(tensor));
  const PerRank y = p.Combine(z, &got.weights);
  PerRank want = x;
  for (size_t rank = 0; rank < want.size(); ++rank) {
    for (size_t i = 0; i < want[rank].size(); ++i) {
      const int64_t token = static_cast<int64_t>(i) / c.hidden;
      double sum = 0;
      for (int64_t k = 0; k < c.top_k; ++k) {
        const auto& target = p.layout().Target(static_cast<int64_t>(rank), token, k);
        if (target.state != reference::RouteState::kPlaced) continue;
        sum += w[rank][static_cast<size_t>(token * c.top_k + k)];
      }
      want[rank][i] *= sum;
    }
  }
  EXPECT_EQ(y, want);
}

TEST_P(ServiceTest, CombineBackwardFillsEveryValidSlotAndZeroesPads) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  const PrimitiveCase c = UsualCase(world(), v1::DTYPE_F16);
  const std::string layer_id = MakeLayer(LayerOf(c));
  Primitives p(service(), layer_id, c, random.Ids(RaggedTokens(world()), c.top_k, c.experts));
  ASSERT_TRUE(p.Prepare());
  const PerRank gy = UniqueRows(p.tokens(), c.hidden, 5);
  const PerRank weights = HalfOrOne(p.rows(), 1);
  EXPECT_EQ(p.CombineBackward(gy, nullptr), reference::CombineBackward(p.layout(), c.hidden, gy));
  EXPECT_EQ(p.CombineBackward(gy, &weights),
            reference::CombineBackward(p.layout(), c.hidden, gy, &weights));
}

TEST_P(ServiceTest, DispatchBackwardAfterCombineBackwardGivesValidRoutesTimesGradient) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  for (const v1::DType dtype : kDTypes) {
    SCOPED_TRACE(v1::DType_Name(dtype));
    const PrimitiveCase c = UsualCase(world(), dtype);
    const std::string layer_id = MakeLayer(LayerOf(c));
    Primitives p(service(), layer_id, c, random.Ids(RaggedTokens(world()), c.top_k, c.experts));
    ASSERT_TRUE(p.Prepare());
    const PerRank gy = UniqueRows(p.tokens(), c.hidden, 6);
    const PerRank gz = p.CombineBackward(gy, nullptr);
    ASSERT_EQ(gz.size(), gy.size());
    PerRank want = gy;
    for (size_t rank = 0; rank < want.size(); ++rank) {
      for (size_t i = 0; i < want[rank].size(); ++i) {
        want[rank][i] *= static_cast<double>(
            p.ValidRoutes(static_cast<int64_t>(rank), static_cast<int64_t>(i) / c.hidden));
      }
    }
    EXPECT_EQ(p.DispatchBackward(gz, UniqueRows(p.rows(), 1, 7)).x, want);
  }
}

TEST_P(ServiceTest, RouteWeightGradientsComeBackExactly) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  const PrimitiveCase c = UsualCase(world(), v1::DTYPE_BF16);
  const std::string layer_id = MakeLayer(LayerOf(c));
  Primitives p(service(), layer_id, c, random.Ids(RaggedTokens(world()), c.top_k, c.experts));
  ASSERT_TRUE(p.Prepare());
  // A gradient of its own for every slot of the group: any f32 must come back as it is.
  PerRank gw;
  for (const int64_t rows : p.rows()) {
    gw.push_back({});
    for (int64_t i = 0; i < rows; ++i) {
      gw.back().push_back(static_cast<float>(random.Uniform(-1e6, 1e6)));
    }
  }
  const PerRank g = UniqueRows(p.rows(), c.hidden, 8);
  const PerRank got = p.DispatchBackward(g, gw).weights;
  EXPECT_EQ(got, reference::DispatchBackward(p.layout(), c.hidden, g, gw).weights);
}

TEST_P(ServiceTest, SameInputsGiveTheSameBitsTwice) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  PrimitiveCase c = UsualCase(world(), v1::DTYPE_BF16);
  c.top_k = std::min<int64_t>(8, c.experts);
  const std::string layer_id = MakeLayer(LayerOf(c));
  const reference::Routing ids = random.Ids(RaggedTokens(world()), c.top_k, c.experts);
  // Values whose sums must be rounded, so that another order would show.
  PerRank z, weights;
  std::vector<PerRank> outputs;
  for (int attempt = 0; attempt < 2; ++attempt) {
    Primitives p(service(), layer_id, c, ids);
    ASSERT_TRUE(p.Prepare());
    if (attempt == 0) {
      z = random.Rows(p.rows(), c.hidden);
      weights = random.Rows(p.rows(), 1);
    }
    outputs.push_back(p.Combine(z, &weights));
    outputs.push_back(p.DispatchBackward(z, weights).x);
  }
  EXPECT_EQ(outputs[0], outputs[2]);
  EXPECT_EQ(outputs[1], outputs[3]);
}

}  // namespace
}  // namespace expertd::conformance
