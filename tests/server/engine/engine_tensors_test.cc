// Resident tensors through the whole engine: the inline bits, every bad place, epochs, failures.
#include <gtest/gtest.h>

#include "tests/server/engine/resident_steps.h"

namespace expertd::engine {
namespace {

INSTANTIATE_TEST_SUITE_P(Cpu, ResidentStepsTest,
                         testing::Values(ResidentShape{"loopback", 1}, ResidentShape{"loopback", 2},
                                         ResidentShape{"loopback", 4}),
                         testing::PrintToStringParamName());

class EngineTensorsTest : public testing::Test {
 protected:
  EngineTensorsTest() {
    cluster_.Form();
    cluster_.CreateReadyLayer();
    Good("x", DType::kF32, {2, 8});
    Good("y", DType::kF32, {2, 8});
    Good("ids", DType::kI32, {2, 2});
    Good("half", DType::kBF16, {2, 8});
  }
  // Stores zeros on rank 0.
  void Good(const std::string& id, DType dtype, std::vector<int64_t> shape) {
    const absl::Status stored = Store(cluster_.engine(0), {id, dtype, std::move(shape)}, nullptr);
    EXPECT_TRUE(stored.ok()) << stored;
  }
  // A forward of rank 0 that `spoil` changes is refused there, for this; the group goes on.
  void ExpectRefused(const std::function<void(ForwardOp&)>& spoil, Reason reason,
                     const std::vector<std::string>& parts) {
    const Answers answers = cluster_.Step([&](int64_t rank) {
      auto op = MakeForward(GlobalRows(rank * 2, 2));
      if (rank == 0) spoil(*op);
      return op;
    });
    const absl::Status& own = answers[0]->status;
    EXPECT_TRUE(HasReason(own, reason)) << own;
    for (const std::string& part : parts) {
      EXPECT_NE(StdView(own.message()).find(part), std::string_view::npos) << part << ": " << own;
    }
    EXPECT_TRUE(HasReason(answers[1]->status, Reason::kPeerRejected)) << answers[1]->status;
    EXPECT_TRUE(Load(cluster_.engine(0), "y") == std::string(64, '\0')) << "was written";
    cluster_.ExpectWorks();
  }
  static void Tokens(ForwardOp& op, const std::string& id, uint64_t offset = 0) {
    op.tokens.data = nullptr;
    op.tokens.buffer = {"tokens.buffer", id, offset};
  }
  static void Output(ForwardOp& op, const std::string& id, uint64_t offset = 0) {
    op.output.buffer = {"output_buffer", id, offset};
  }

  Cluster cluster_{2};
};

TEST_F(EngineTensorsTest, BadPlacesOfInputsAreRefusedByNameAndTakeTheirSequence) {
  ExpectRefused([](ForwardOp& op) { Tokens(op, "no"); }, Reason::kBufferUnknown,
                {"tokens.buffer", "\"no\"", "epoch 1"});
  ExpectRefused([](ForwardOp& op) { Tokens(op, "x", 4); }, Reason::kBufferRange,
                {"tokens.buffer", "offset 4", "64 bytes", "need 64"});
  ExpectRefused([](ForwardOp& op) { Tokens(op, "x", ~uint64_t{0} - 3); }, Reason::kBufferRange,
                {"tokens.buffer", "64 bytes"});
  ExpectRefused([](ForwardOp& op) { Tokens(op, "x", 65); }, Reason::kBufferRange, {"offset 65"});
  ExpectRefused([](ForwardOp& op) { Tokens(op, "half"); }, Reason::kDtypeUnsupported,
                {"tokens.buffer", "DTYPE_BF16", "DTYPE_F32"});
}

TEST_F(EngineTensorsTest, OffsetInsideAnElementIsRefused) {
  Good("wide", DType::kF32, {4, 8});
  ExpectRefused([](ForwardOp& op) { Tokens(op, "wide", 6); }, Reason::kBufferRange,
                {"tokens.buffer.offset_bytes", "got 6", "multiple of 4"});
  ExpectRefused([](ForwardOp& op) { Output(op, "wide", 6); }, Reason::kBufferRange,
                {"output_buffer.offset_bytes", "got 6"});
}

TEST_F(EngineTensorsTest, BadPlacesOfResultsAreRefusedBeforeAnyoneMoves) {
  ExpectRefused([](ForwardOp& op) { Output(op, "no"); }, Reason::kBufferUnknown,
                {"output_buffer", "\"no\""});
  ExpectRefused([](ForwardOp& op) { Output(op, "y", 4); }, Reason::kBufferRange,
                {"output_buffer", "offset 4", "need 64"});
  ExpectRefused([](ForwardOp& op) { Output(op, "half"); }, Reason::kDtypeUnsupported,
                {"output_buffer", "DTYPE_BF16"});
}

TEST_F(EngineTensorsTest, AllBadPlacesOfARequestAreReported) {
  ExpectRefused(
      [](ForwardOp& op) {
        Tokens(op, "no");
        op.topk_ids.buffer = {"topk.topk_ids.buffer", "x", 0};
        Output(op, "neither");
      },
      Reason::kBufferUnknown, {"\"no\"", "topk.topk_ids.buffer", "DTYPE_I32", "\"neither\""});
}

TEST_F(EngineTensorsTest, OverlappingPlacesAreRefused) {
  Good("wide", DType::kF32, {3, 8});
  ExpectRefused(
      [](ForwardOp& op) {
        Tokens(op, "wide");
        Output(op, "wide", 32);
      },
      Reason::kBufferRange, {"output_buffer", "bytes 32 to 96", "0 to 64", "tokens.buffer"});
  // Side by side they are fine.
  Good("both", DType::kF32, {4, 8});
  const Answers answers = cluster_.Step([&](int64_t rank) {
    auto op = MakeForward(GlobalRows(rank * 2, 2));
    if (rank == 0) {
      Tokens(*op, "both", 64);
      Output(*op, "both", 0);
    }
    return op;
  });
  for (const Answer& answer : answers) EXPECT_TRUE(answer->status.ok()) << answer->status;
}

TEST_F(EngineTensorsTest, BadValuesInAPlaceAreFound) {
  const std::string ids("\1\0\0\0\1\0\0\0\x7f\0\0\0\0\0\0\0", 16);
  ASSERT_TRUE(Store(cluster_.engine(0), {"bad", DType::kI32, {4}}, &ids).ok());
  ExpectRefused(
      [](ForwardOp& op) {
        op.topk_ids.data = nullptr;
        op.topk_ids.buffer = {"topk.topk_ids.buffer", "bad", 0};
      },
      Reason::kDuplicateExpert, {"topk_ids[0,1]", "topk_ids[1,0]", "127"});
}

TEST_F(EngineTensorsTest, BufferForAResultThatIsNotThereIsRefused) {
  const Answers kept =
      cluster_.Good([](int64_t rank) { return MakeForward(GlobalRows(rank * 2, 2), true); });
  Good("logits", DType::kF32, {2, 8});
  const Answers answers = cluster_.Step([&](int64_t rank) {
    auto op =
        MakeBackward(static_cast<const ForwardOp&>(*kept[static_cast<size_t>(rank)]).ticket, 2);
    if (rank == 0) op->router_logits_gradient.buffer = {"router_logits_gradient_buffer", "logits"};
    return op;
  });
  EXPECT_TRUE(HasReason(answers[0]->status, Reason::kConfigInvalid)) << answers[0]->status;
  EXPECT_TRUE(HasReason(answers[1]->status, Reason::kPeerRejected)) << answers[1]->status;
  // The ticket is still good.
  cluster_.Good([&](int64_t rank) {
    return MakeBackward(static_cast<const ForwardOp&>(*kept[static_cast<size_t>(rank)]).ticket, 2);
  });
}

TEST_F(EngineTensorsTest, NextEpochRefusesTheTensorsOfTheLastByName) {
  cluster_.Form(2);
  EXPECT_EQ(cluster_.engine(0).Counters().tensor_bytes, 0);
  EXPECT_TRUE(cluster_.engine(0).ListTensors().empty());
  const Answers answers = cluster_.Step([&](int64_t rank) {
    auto op = MakeForward(GlobalRows(rank * 2, 2));
    if (rank == 0) Tokens(*op, "x");
    return op;
  });
  const absl::Status& own = answers[0]->status;
  EXPECT_TRUE(HasReason(own, Reason::kBufferUnknown)) << own;
  EXPECT_NE(StdView(own.message()).find("it belonged to epoch 1"), std::string_view::npos) << own;
  const absl::Status stale =
      Store(cluster_.engine(0), {"z", DType::kF32, {1}, 0, /*epoch=*/1}, nullptr);
  EXPECT_TRUE(HasReason(stale, Reason::kEpochStale)) << stale;
}

TEST_F(EngineTensorsTest, WithoutAGroupNothingIsStored) {
  ASSERT_TRUE(cluster_.Leave(0, 1).ok());
  EXPECT_EQ(cluster_.engine(0).Counters().tensor_bytes, 0);
  const absl::Status stored = Store(cluster_.engine(0), {"z", DType::kF32, {1}}, nullptr);
  EXPECT_TRUE(HasReason(stored, Reason::kGroupNotReady)) << stored;
}

TEST_F(EngineTensorsTest, WriteInTheMiddleOfAReadIsNoticed) {
  const auto state = cluster_.engine(0).FindTensor("y");
  ASSERT_TRUE(state.ok());
  cluster_.Good([&](int64_t rank) {
    auto op = MakeForward(GlobalRows(rank * 2, 2));
    if (rank == 0) Output(*op, "y");
    return op;
  });
  auto promise = std::make_shared<std::promise<absl::Status>>();
  cluster_.engine(0).ReadTensor(
      {"y", 0, 64, state->version},
      [promise](absl::StatusOr<std::string> bytes) { promise->set_value(bytes.status()); });
  const absl::Status status = Await(promise->get_future());
  EXPECT_TRUE(HasReason(status, Reason::kVersionBehind)) << status;
}

TEST_F(EngineTensorsTest, RetryIsAnsweredWithoutWritingAgain) {
  const auto make = [&](int64_t rank) {
    auto op = MakeForward(GlobalRows(rank * 2, 2));
    if (rank == 0) Output(*op, "y");
    return op;
  };
  cluster_.Good(make);
  const uint64_t version = cluster_.engine(0).FindTensor("y")->version;
  const Answer again = Await(cluster_.Submit(0, make(0), cluster_.next - 1));
  ASSERT_TRUE(again->status.ok()) << again->status;
  EXPECT_EQ(static_cast<const ForwardOp&>(*again).output.buffer.buffer_id, "y");
  EXPECT_EQ(cluster_.engine(0).FindTensor("y")->version, version);
}

TEST_F(EngineTensorsTest, StepThatFailsInTheMiddleSaysThatThePlaceMayBeOverwritten) {
  cluster_.config.base_timeout_ms = 300;
  cluster_.config.capacity_policy = CapacityPolicy::kRefuse;
  cluster_.config.max_recv_rows_per_rank = 1;
  cluster_.Form(2);
  Good("y", DType::kF32, {2, 8});
  const Answers answers = cluster_.Step([&](int64_t rank) {
    auto op = MakeForward(GlobalRows(rank * 2, 2));
    if (rank == 0) Output(*op, "y");
    return op;
  });
  const absl::Status& own = answers[0]->status;
  EXPECT_TRUE(HasReason(own, Reason::kRecvCapacity)) << own;
  EXPECT_NE(StdView(own.message()).find("\"y\" may be overwritten in part"), std::string_view::npos)
      << own;
}

// The bytes of a request lie at any address.
TEST_F(EngineTensorsTest, MisalignedInlineTensorsGiveTheSameBits) {
  const Answers aligned =
      cluster_.Good([](int64_t rank) { return MakeForward(GlobalRows(rank * 2, 2)); });
  for (const size_t shift : {1, 2, 3, 5}) {
    const Answers shifted = cluster_.Good([&](int64_t rank) {
      auto op = MakeForward(GlobalRows(rank * 2, 2));
      auto bytes = std::make_shared<std::vector<std::string>>();
      for (TensorInput* input : op->Inputs()) {
        if (!input->present()) continue;
        // Operator new aligns to 16, so that this is `shift` off.
        std::string& copy = bytes->emplace_back(64 + shift, '\0');
        copy.append(static_cast<const char*>(input->data), static_cast<size_t>(input->bytes));
      }
      size_t next = 0;
      for (TensorInput* input : op->Inputs()) {
        if (input->present()) input->data = (*bytes)[next++].data() + 64 + shift;
      }
      op->keep_alive = bytes;
      return op;
    });
    for (size_t rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(static_cast<const ForwardOp&>(*shifted[rank]).output.data,
                static_cast<const ForwardOp&>(*aligned[rank]).output.data);
    }
  }
}

TEST_F(EngineTensorsTest, MemoryLimitIsNamedAndHolds) {
  Cluster small(1, [](EngineOptions& options) { options.tensor_memory_bytes = 100; });
  small.Form();
  ASSERT_TRUE(Store(small.engine(0), {"a", DType::kF32, {20}}, nullptr).ok());
  const absl::Status over = Store(small.engine(0), {"b", DType::kF32, {6}}, nullptr);
  EXPECT_TRUE(HasReason(over, Reason::kMemoryBudget)) << over;
  EXPECT_NE(StdView(over.message()).find("--tensor_memory_bytes"), std::string_view::npos) << over;
  ASSERT_TRUE(small.engine(0).DeleteTensor("a").ok());
  EXPECT_TRUE(Store(small.engine(0), {"b", DType::kF32, {25}}, nullptr).ok());
}

}  // namespace
}  // namespace expertd::engine
