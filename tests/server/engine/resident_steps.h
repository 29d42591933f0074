// Steps whose tensors are resident, compared bit for bit with the same steps inline; at any
// backend.
#ifndef TESTS_SERVER_ENGINE_RESIDENT_STEPS_H_
#define TESTS_SERVER_ENGINE_RESIDENT_STEPS_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/strings.h"
#include "server/engine/buffer_places.h"
#include "tests/server/engine/cluster.h"

namespace expertd::engine {

// Stores a tensor of these bytes, or of zeros.
inline absl::Status Store(Engine& engine, TensorInfo info, const std::string* bytes) {
  info.bytes = static_cast<int64_t>(DTypeSize(info.dtype));
  for (const int64_t size : info.shape) info.bytes *= size;
  const auto store = engine.BeginTensor(
      info, bytes == nullptr ? TensorStore::Fill::kZeros : TensorStore::Fill::kChunks);
  if (!store.ok()) return store.status();
  if (bytes != nullptr) {
    auto written = std::make_shared<std::promise<absl::Status>>();
    engine.WriteTensor(*store, 0, *bytes,
                       [written](absl::Status status) { written->set_value(std::move(status)); });
    absl::Status status = Await(written->get_future());
    if (!status.ok()) return status;
  }
  auto finished = std::make_shared<std::promise<absl::Status>>();
  engine.FinishTensor(*store, [finished](absl::StatusOr<TensorInfo> stored) {
    finished->set_value(stored.status());
  });
  return Await(finished->get_future());
}

// All bytes of a tensor; a failed test and nothing when it cannot be read.
inline std::string Load(Engine& engine, const std::string& id) {
  const auto state = engine.FindTensor(id);
  if (!state.ok()) {
    ADD_FAILURE() << state.status();
    return {};
  }
  auto promise = std::make_shared<std::promise<absl::StatusOr<std::string>>>();
  engine.ReadTensor({id, 0, state->info.bytes, state->version},
                    [promise](absl::StatusOr<std::string> bytes) { promise->set_value(bytes); });
  absl::StatusOr<std::string> bytes = Await(promise->get_future());
  EXPECT_TRUE(bytes.ok()) << bytes.status();
  return bytes.ok() ? *bytes : std::string();
}

struct ResidentShape {
  std::string backend;
  int64_t world = 1;
};
inline void PrintTo(const ResidentShape& shape, std::ostream* out) {
  *out << shape.backend << "_" << shape.world;
}

class ResidentStepsTest : public testing::TestWithParam<ResidentShape> {
 protected:
  ResidentStepsTest()
      : cluster_(GetParam().world, [](EngineOptions& options) {
          if (GetParam().backend == "loopback") return;
          options.device = StrCat("cuda:", options.slot);
          options.expert_mlp = "";
          options.data_host = "127.0.0.1";
        }) {
    cluster_.config.backend = GetParam().backend;
    cluster_.Form();
  }
  int64_t world() const { return GetParam().world; }
  // Rank 1 has no tokens: a rank that brings nothing has places of no bytes.
  static int64_t TokensOf(int64_t rank) { return rank == 1 ? 0 : 3; }

  // Makes every input of `op` a place in a tensor of its own, `skew` elements from its start.
  void MoveInputs(int64_t rank, Operation& op, int64_t skew) {
    for (TensorInput* input : op.Inputs()) {
      if (!input->present() || input->buffer.present()) continue;
      const size_t before = static_cast<size_t>(skew) * DTypeSize(input->dtype);
      std::string bytes(before, '\x7f');
      bytes.append(static_cast<const char*>(input->data), static_cast<size_t>(input->bytes));
      const std::string id = StrCat("in", ++names_);
      const auto elements = static_cast<int64_t>(bytes.size() / DTypeSize(input->dtype));
      const absl::Status stored =
          Store(cluster_.engine(rank), {id, input->dtype, {elements}}, &bytes);
      ASSERT_TRUE(stored.ok()) << stored;
      input->data = nullptr;
      input->buffer = {id, id, before};
    }
  }
  // Gives a result a place in a tensor of its own, with `skew` elements around it.
  std::string MoveOutput(int64_t rank, TensorOutput& output, const TensorOutput& like,
                         int64_t skew) {
    const std::string id = StrCat("out", ++names_);
    const auto elements = static_cast<int64_t>(like.data.size() / DTypeSize(like.dtype));
    const absl::Status stored =
        Store(cluster_.engine(rank), {id, like.dtype, {elements + 2 * skew}}, nullptr);
    EXPECT_TRUE(stored.ok()) << stored;
    output.buffer = {id, id, static_cast<uint64_t>(skew) * DTypeSize(like.dtype)};
    return id;
  }
  // The tensor holds the inline result, and around it still zeros.
  void ExpectAt(int64_t rank, const std::string& id, const TensorOutput& got,
                const TensorOutput& like, int64_t skew) {
    EXPECT_EQ(got.dtype, like.dtype);
    EXPECT_EQ(got.shape, like.shape);
    EXPECT_TRUE(got.data.empty());
    EXPECT_EQ(got.buffer.buffer_id, id);
    const std::string around(static_cast<size_t>(skew) * DTypeSize(like.dtype), '\0');
    EXPECT_TRUE(Load(cluster_.engine(rank), id) == around + like.data + around)
        << id << " of rank " << rank << " differs from the inline result";
  }

  using Make = std::function<std::shared_ptr<Operation>(int64_t rank)>;
  // Runs the same operation inline, then resident, and compares all results. Returns the resident
  // answers and, in `inlined`, the others. `remake` makes the second one.
  Answers Compare(const Make& make, const Make& remake, int64_t skew, Answers* inlined) {
    *inlined = cluster_.Good(make);
    std::vector<std::vector<std::string>> ids(static_cast<size_t>(world()));
    const Answers answers = cluster_.Good([&](int64_t rank) {
      std::shared_ptr<Operation> op = remake(rank);
      MoveInputs(rank, *op, skew);
      const auto likes = Outputs((*inlined)[static_cast<size_t>(rank)]);
      for (size_t i = 0; i < likes.size(); ++i) {
        ids[static_cast<size_t>(rank)].push_back(
            likes[i]->present() ? MoveOutput(rank, *op->Outputs()[i], *likes[i], skew) : "");
      }
      return op;
    });
    for (int64_t rank = 0; rank < world(); ++rank) {
      const auto r = static_cast<size_t>(rank);
      const auto likes = Outputs((*inlined)[r]);
      const auto gots = Outputs(answers[r]);
      for (size_t i = 0; i < likes.size(); ++i) {
        EXPECT_EQ(gots[i]->present(), likes[i]->present());
        if (likes[i]->present()) ExpectAt(rank, ids[r][i], *gots[i], *likes[i], skew);
      }
    }
    return answers;
  }
  static std::vector<TensorOutput*> Outputs(const Answer& answer) {
    return std::const_pointer_cast<Operation>(answer)->Outputs();
  }
  template <typename Op>
  static const Op& As(const Answers& answers, int64_t rank) {
    return static_cast<const Op&>(*answers[static_cast<size_t>(rank)]);
  }

  std::shared_ptr<ForwardOp> Forward(int64_t rank, RoutingSource routing) {
    const int64_t tokens = TokensOf(rank);
    auto op = MakeForward(GlobalRows(rank * 3, tokens), true);
    op->routing = routing;
    if (routing == RoutingSource::kTopk) return op;
    op->topk_ids = op->topk_weights = {};
    if (routing == RoutingSource::kLayerRouter) return op;
    auto logits = std::make_shared<std::pair<std::shared_ptr<const void>, std::vector<float>>>();
    logits->first = op->keep_alive;
    for (int64_t i = 0; i < tokens * 8; ++i) {
      logits->second.push_back(static_cast<float>((i * 5 + rank) % 8) / 3.0f);
    }
    op->router_logits = View(DType::kF32, {tokens, 8}, logits->second);
    op->keep_alive = logits;
    return op;
  }

  void CheckTraining(RoutingSource routing) {
    LayerConfig config = SmallLayer();
    if (routing != RoutingSource::kTopk) config.router.kind = RouterKind::kSoftmax;
    config.router_on_server = routing == RoutingSource::kLayerRouter;
    cluster_.CreateReadyLayer(config);
    for (const int64_t skew : {0, 1, 3, 64}) {
      SCOPED_TRACE(testing::Message() << "skew " << skew);
      const Make forward = [&](int64_t rank) { return Forward(rank, routing); };
      Answers inlined;
      const Answers resident = Compare(forward, forward, skew, &inlined);
      const auto backward = [](const Answers& of) {
        return [&of](int64_t rank) {
          return MakeBackward(As<ForwardOp>(of, rank).ticket, TokensOf(rank));
        };
      };
      Answers gradients;
      Compare(backward(inlined), backward(resident), skew, &gradients);
    }
  }

  Cluster cluster_;
  int names_ = 0;
};

TEST_P(ResidentStepsTest, ForwardAndBackwardWithTopkGiveTheInlineBits) {
  CheckTraining(RoutingSource::kTopk);
}

TEST_P(ResidentStepsTest, ForwardAndBackwardWithLogitsGiveTheInlineBits) {
  CheckTraining(RoutingSource::kLogits);
}

TEST_P(ResidentStepsTest, ForwardAndBackwardWithTheLayersRouterGiveTheInlineBits) {
  CheckTraining(RoutingSource::kLayerRouter);
}

// Values for a primitive: an operation of the kind with tensors of `rows` and `columns`.
inline TensorInput Numbers(const std::vector<float>& all, int64_t rows, int64_t columns) {
  TensorInput input = View(DType::kF32, {rows}, all);
  if (columns > 0) input.shape.push_back(columns);
  input.bytes = rows * std::max<int64_t>(1, columns) * 4;
  return input;
}

TEST_P(ResidentStepsTest, PrimitivesGiveTheInlineBits) {
  cluster_.CreateReadyLayer();
  auto numbers = std::make_shared<std::vector<float>>();
  for (int i = 0; i < 1024; ++i) numbers->push_back(static_cast<float>(i % 37 - 18) / 8.0f);
  for (const int64_t skew : {0, 1, 64}) {
    SCOPED_TRACE(testing::Message() << "skew " << skew);
    const Make prepare = [](int64_t rank) {
      auto op = std::make_shared<PrepareOp>();
      auto owned = std::make_shared<ForwardInputs>(GlobalRows(rank * 3, TokensOf(rank)));
      op->layer_id = "layer";
      op->topk_ids = View(DType::kI32, {TokensOf(rank), 2}, owned->ids);
      op->keep_alive = owned;
      return op;
    };
    Answers prepared;
    const Answers again = Compare(prepare, prepare, skew, &prepared);
    const auto rows = [&](int64_t rank) { return As<PrepareOp>(prepared, rank).total_rows; };
    Answers ignored;
    const auto both =
        [&](const std::function<std::shared_ptr<Operation>(int64_t, uint64_t)>& make) {
          const auto with = [&make](const Answers& of) {
            return [&](int64_t rank) { return make(rank, As<PrepareOp>(of, rank).handle); };
          };
          Compare(with(prepared), with(again), skew, &ignored);
        };
    both([&](int64_t rank, uint64_t handle) {
      auto op = std::make_shared<DispatchOp>();
      op->handle = handle;
      op->tokens = Numbers(*numbers, TokensOf(rank), 8);
      op->topk_weights = Numbers(*numbers, TokensOf(rank), 2);
      return op;
    });
    both([&](int64_t rank, uint64_t handle) {
      auto op = std::make_shared<CombineOp>();
      op->handle = handle;
      op->expert_output = Numbers(*numbers, rows(rank), 8);
      op->slot_weights = Numbers(*numbers, rows(rank), 0);
      return op;
    });
    both([&](int64_t rank, uint64_t handle) {
      auto op = std::make_shared<CombineBackwardOp>();
      op->handle = handle;
      op->output_gradient = Numbers(*numbers, TokensOf(rank), 8);
      return op;
    });
    both([&](int64_t rank, uint64_t handle) {
      auto op = std::make_shared<DispatchBackwardOp>();
      op->handle = handle;
      op->recv_tokens_gradient = Numbers(*numbers, rows(rank), 8);
      op->recv_weights_gradient = Numbers(*numbers, rows(rank), 0);
      return op;
    });
  }
}

TEST_P(ResidentStepsTest, ResultsOfOneStepAreInputsOfTheNext) {
  cluster_.CreateReadyLayer();
  const Answers first =
      cluster_.Good([&](int64_t rank) { return Forward(rank, RoutingSource::kTopk); });
  const Answers second = cluster_.Good([&](int64_t rank) {
    auto op = Forward(rank, RoutingSource::kTopk);
    auto owned = std::make_shared<std::vector<float>>(Floats(As<ForwardOp>(first, rank).output));
    auto kept = std::make_shared<std::pair<std::shared_ptr<const void>, std::shared_ptr<void>>>(
        op->keep_alive, owned);
    op->tokens = View(DType::kF32, {TokensOf(rank), 8}, *owned);
    op->keep_alive = kept;
    return op;
  });
  // The same two layers without a byte of activations in between; both steps are in the queue.
  std::vector<std::future<Answer>> futures;
  for (int64_t rank = 0; rank < world(); ++rank) {
    for (const char* id : {"a", "b"}) {
      ASSERT_TRUE(
          Store(cluster_.engine(rank), {id, DType::kF32, {TokensOf(rank), 8}}, nullptr).ok());
    }
  }
  for (int64_t rank = 0; rank < world(); ++rank) {
    auto one = Forward(rank, RoutingSource::kTopk);
    one->output.buffer = {"output_buffer", "a", 0};
    auto two = Forward(rank, RoutingSource::kTopk);
    two->tokens.data = nullptr;
    two->tokens.buffer = {"tokens.buffer", "a", 0};
    two->output.buffer = {"output_buffer", "b", 0};
    futures.push_back(cluster_.Submit(rank, one, cluster_.next));
    futures.push_back(cluster_.Submit(rank, two, cluster_.next + 1));
    // The queued steps keep what they name.
    EXPECT_TRUE(cluster_.engine(rank).DeleteTensor("a").ok());
  }
  cluster_.next += 2;
  for (auto& future : futures) {
    const Answer answer = Await(std::move(future));
    EXPECT_TRUE(answer->status.ok()) << answer->status;
  }
  for (int64_t rank = 0; rank < world(); ++rank) {
    EXPECT_TRUE(Load(cluster_.engine(rank), "b") == As<ForwardOp>(second, rank).output.data);
    EXPECT_TRUE(HasReason(cluster_.engine(rank).FindTensor("a").status(), Reason::kBufferUnknown));
    // Finished steps are kept for retries, their tensors are not.
    EXPECT_EQ(cluster_.engine(rank).Counters().tensor_bytes, TokensOf(rank) * 8 * 4);
    EXPECT_EQ(cluster_.engine(rank).Counters().tensors, 1);
  }
}

TEST_P(ResidentStepsTest, SteadyStepsAllocateNoBlocks) {
  cluster_.CreateReadyLayer();
  for (int64_t rank = 0; rank < world(); ++rank) {
    ASSERT_TRUE(Store(cluster_.engine(rank), {"y", DType::kF32, {3, 8}}, nullptr).ok());
  }
  const auto step = [&] {
    cluster_.Good([&](int64_t rank) {
      auto op = Forward(rank, RoutingSource::kTopk);
      op->keep_for_backward = false;
      op->output.buffer = {"output_buffer", "y", 0};
      return op;
    });
    return cluster_.engine(0).Counters().device_block_allocations;
  };
  step();
  const int64_t before = step();
  for (int i = 0; i < 4; ++i) EXPECT_EQ(step(), before);
}

}  // namespace expertd::engine

#endif  // TESTS_SERVER_ENGINE_RESIDENT_STEPS_H_
