// Resident tensors through the service: what is stored, what steps make of it, what is refused.
#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/strings.h"
#include "expertd/v1/tensor_service.grpc.pb.h"
#include "tests/conformance/service/service_test.h"
#include "tests/reference/test_random.h"

namespace expertd::conformance {
namespace {

using reference::TestRandom;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kExperts = 24;  // divides among every world size of the suite
constexpr int64_t kHidden = 12;   // rows of 48 bytes: GPUs want multiples of 16
constexpr int64_t kTopK = 3;

absl::Time Limit() { return absl::Now() + testing::kWait; }

// One stream of PutTensor as a test writes it.
struct RawPut {
  explicit RawPut(client::RankClient& rank) {
    context.set_deadline(absl::ToChronoTime(Limit()));
    stub = v1::TensorService::NewStub(
        std::shared_ptr<grpc::Channel>(&rank.channel(), [](grpc::Channel*) {}));
    writer = stub->PutTensor(&context, &response);
  }
  absl::Status Finish() {
    writer->WritesDone();
    return client::FromGrpc(writer->Finish(), {});
  }

  grpc::ClientContext context;
  v1::PutTensorResponse response;
  std::unique_ptr<v1::TensorService::Stub> stub;
  std::unique_ptr<grpc::ClientWriter<v1::PutTensorRequest>> writer;
};

v1::PutTensorRequest First(int64_t bytes) {
  v1::PutTensorRequest message;
  message.set_buffer_id("t");
  message.mutable_tensor()->set_dtype(v1::DTYPE_F8E5M2);
  message.mutable_tensor()->add_shape(bytes);
  return message;
}

v1::PutTensorRequest Chunk(int64_t bytes) {
  v1::PutTensorRequest message;
  message.set_chunk(std::string(static_cast<size_t>(bytes), 'c'));
  return message;
}

class Residency {
 public:
  explicit Residency(ServiceTest& test) : test_(test) {}

  // Stores the tensor at `rank` under `id`, which becomes its payload.
  v1::Tensor Put(int64_t rank, const std::string& id, const v1::Tensor& tensor) {
    const auto epoch = test_.service().rank(rank).PutTensor(id, tensor, Limit());
    EXPECT_TRUE(epoch.ok()) << epoch.status();
    const client::Shape shape(tensor.shape().begin(), tensor.shape().end());
    return client::BufferTensor(tensor.dtype(), shape, id);
  }
  // A place for what `like` holds.
  void Zeros(int64_t rank, const std::string& id, const v1::Tensor& like, v1::BufferRef* place) {
    v1::Tensor zeros = like;
    zeros.clear_payload();
    Put(rank, id, zeros);
    client::SetBuffer(id, place);
  }
  void Expect(int64_t rank, const v1::Tensor& answered, const v1::Tensor& want) {
    EXPECT_TRUE(answered.has_buffer()) << "the result is in the response";
    EXPECT_TRUE(std::ranges::equal(answered.shape(), want.shape()));
    const auto got = test_.service().rank(rank).GetTensor(answered.buffer().buffer_id(), Limit());
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_TRUE(got->SerializeAsString() == want.SerializeAsString())
        << answered.buffer().buffer_id() << " of rank " << rank << " is not the inline result";
  }
  v1::ListTensorsResponse List(int64_t rank) {
    auto list = test_.service().rank(rank).Call(v1::ListTensorsRequest(), testing::Soon());
    EXPECT_TRUE(list.ok()) << list.status();
    return list.ok() ? *list : v1::ListTensorsResponse();
  }
  absl::Status Delete(int64_t rank, const std::string& id) {
    v1::DeleteTensorRequest request;
    request.set_buffer_id(id);
    return test_.service().rank(rank).Call(request, testing::Soon()).status();
  }
  // Deletes all tensors of all ranks: then no memory is in use.
  void ExpectNoneLeft() {
    for (int64_t rank = 0; rank < test_.world(); ++rank) {
      const v1::ListTensorsResponse list = List(rank);
      for (const v1::TensorEntry& entry : list.tensors()) {
        const absl::Status deleted = Delete(rank, entry.buffer_id());
        EXPECT_TRUE(deleted.ok()) << deleted;
      }
      WaitForUsed(rank, 0);
    }
  }
  void WaitForUsed(int64_t rank, int64_t bytes) {
    const absl::Time end = Limit();
    while (List(rank).used_bytes() != bytes) {
      ASSERT_LT(absl::Now(), end) << "used: got " << List(rank).used_bytes() << ", need " << bytes;
      absl::SleepFor(absl::Milliseconds(1));
    }
  }

 private:
  ServiceTest& test_;
};

v1::Tensor Bytes(TestRandom& random, v1::DType dtype, const client::Shape& shape) {
  v1::Tensor tensor;
  tensor.set_dtype(dtype);
  tensor.mutable_shape()->Assign(shape.begin(), shape.end());
  std::string data(static_cast<size_t>(client::PayloadBytes(tensor)), '\0');
  for (char& byte : data) byte = static_cast<char>(random.Integer(0, 255));
  tensor.set_data(std::move(data));
  return tensor;
}

TEST_P(ServiceTest, TensorsComeBackBitForBitFromEveryRank) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  Residency residency(*this);
  const std::vector<std::pair<v1::DType, client::Shape>> cases = {
      {v1::DTYPE_F32, {0, 5}},
      {v1::DTYPE_F32, {}},
      {v1::DTYPE_BF16, {3, 5}},
      {v1::DTYPE_F16, {1}},
      {v1::DTYPE_I64, {2, 3, 4}},
      {v1::DTYPE_I32, {7, 1, 1, 1, 1, 1, 1, 2}},
      {v1::DTYPE_F8E5M2, {2 * kMiB - 1}},
      {v1::DTYPE_F8E4M3FN, {2 * kMiB}},
      {v1::DTYPE_F8E5M2, {2 * kMiB + 1}},
      {v1::DTYPE_F32, {kMiB + 3}}};
  for (int64_t rank = 0; rank < world(); ++rank) {
    // The large ones only once: they are the same everywhere.
    const size_t count = rank == world() - 1 ? cases.size() : 6;
    for (size_t i = 0; i < count; ++i) {
      SCOPED_TRACE(::testing::Message() << "rank " << rank << ", case " << i);
      const v1::Tensor tensor = Bytes(random, cases[i].first, cases[i].second);
      residency.Expect(rank, residency.Put(rank, StrCat("t", i), tensor), tensor);
    }
    const v1::ListTensorsResponse list = residency.List(rank);
    ASSERT_EQ(list.tensors_size(), static_cast<int>(count));
    EXPECT_EQ(list.tensors(2).buffer_id(), "t2");
    EXPECT_EQ(list.tensors(2).dtype(), v1::DTYPE_BF16);
    EXPECT_EQ(list.tensors(2).size_bytes(), 30);
    EXPECT_EQ(list.tensors(2).epoch(), service().group().epoch());
    int64_t bytes = 0;
    for (const v1::TensorEntry& entry : list.tensors()) bytes += entry.size_bytes();
    EXPECT_EQ(list.used_bytes(), bytes);
  }
  EXPECT_TRUE(HasReason(residency.Delete(0, "none"), Reason::kBufferUnknown));
  residency.ExpectNoneLeft();
}

TEST_P(ServiceTest, PartOfATensorComesBack) {
  TestRandom random;
  Residency residency(*this);
  const v1::Tensor tensor = Bytes(random, v1::DTYPE_F32, {kMiB});
  residency.Put(0, "t", tensor);
  v1::GetTensorRequest request;
  request.mutable_buffer()->set_buffer_id("t");
  request.mutable_buffer()->set_offset_bytes(12);
  request.set_size_bytes(3 * kMiB);
  RawPut raw(service().rank(0));  // for its stub
  grpc::ClientContext context;
  auto reader = raw.stub->GetTensor(&context, request);
  std::string got;
  for (v1::GetTensorResponse chunk; reader->Read(&chunk);) {
    EXPECT_EQ(chunk.offset_bytes(), 12 + got.size());
    got += chunk.chunk();
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_TRUE(got == tensor.data().substr(12, 3 * kMiB));
  (void)raw.Finish();
  residency.ExpectNoneLeft();
}

// Forward and backward requests of every rank, with their tensors inline.
std::vector<v1::ForwardRequest> Forwards(const std::string& layer_id, int64_t world,
                                         TestRandom& random) {
  std::vector<v1::ForwardRequest> requests;
  std::vector<int64_t> tokens;
  for (int64_t rank = 0; rank < world; ++rank) tokens.push_back(4 + rank % 3);
  const reference::Routing ids = random.Ids(tokens, kTopK, kExperts);
  for (size_t rank = 0; rank < tokens.size(); ++rank) {
    v1::ForwardRequest& request = requests.emplace_back();
    request.set_layer_id(layer_id);
    request.set_keep_for_backward(true);
    *request.mutable_tokens() =
        TokenTensor(v1::DTYPE_F32, random.Values(tokens[rank] * kHidden), kHidden);
    *request.mutable_topk()->mutable_topk_ids() = IdTensor(ids[rank], kTopK);
    *request.mutable_topk()->mutable_topk_weights() =
        WeightTensor(random.Values(tokens[rank] * kTopK), kTopK);
  }
  return requests;
}

std::vector<v1::BackwardRequest> Backwards(const std::vector<v1::ForwardResponse>& forwards) {
  std::vector<v1::BackwardRequest> requests;
  for (const v1::ForwardResponse& forward : forwards) {
    v1::BackwardRequest& request = requests.emplace_back();
    request.set_ticket(forward.ticket());
    *request.mutable_output_gradient() = forward.output();
  }
  return requests;
}

TEST_P(ServiceTest, ForwardAndBackwardThroughResidentTensorsGiveTheInlineBits) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  Residency residency(*this);
  const std::string layer_id = MakeLayer(SmallLayer(kExperts, kTopK, kHidden, 6), /*seed=*/7);
  const auto requests = Forwards(layer_id, world(), random);
  const auto inlined = Run(requests);
  ASSERT_EQ(inlined.size(), requests.size());
  const auto gradients = Run(Backwards(inlined));
  ASSERT_EQ(gradients.size(), requests.size());

  std::vector<v1::ForwardRequest> forwards = requests;
  for (int64_t rank = 0; rank < world(); ++rank) {
    v1::ForwardRequest& request = forwards[static_cast<size_t>(rank)];
    *request.mutable_tokens() = residency.Put(rank, "x", request.tokens());
    *request.mutable_topk()->mutable_topk_ids() =
        residency.Put(rank, "ids", request.topk().topk_ids());
    *request.mutable_topk()->mutable_topk_weights() =
        residency.Put(rank, "w", request.topk().topk_weights());
    residency.Zeros(rank, "y", inlined[static_cast<size_t>(rank)].output(),
                    request.mutable_output_buffer());
  }
  const auto resident = Run(std::move(forwards));
  ASSERT_EQ(resident.size(), requests.size());
  // The output is the backward's gradient, straight from where it lies.
  std::vector<v1::BackwardRequest> backwards = Backwards(resident);
  for (int64_t rank = 0; rank < world(); ++rank) {
    const auto r = static_cast<size_t>(rank);
    residency.Expect(rank, resident[r].output(), inlined[r].output());
    residency.Zeros(rank, "gx", gradients[r].tokens_gradient(),
                    backwards[r].mutable_tokens_gradient_buffer());
    residency.Zeros(rank, "gw", gradients[r].topk_weights_gradient(),
                    backwards[r].mutable_topk_weights_gradient_buffer());
  }
  const auto answers = Run(std::move(backwards));
  ASSERT_EQ(answers.size(), requests.size());
  for (int64_t rank = 0; rank < world(); ++rank) {
    const auto r = static_cast<size_t>(rank);
    residency.Expect(rank, answers[r].tokens_gradient(), gradients[r].tokens_gradient());
    residency.Expect(rank, answers[r].topk_weights_gradient(),
                     gradients[r].topk_weights_gradient());
  }
  residency.ExpectNoneLeft();
}

TEST_P(ServiceTest, PrimitivesThroughResidentTensorsGiveTheInlineBits) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  Residency residency(*this);
  const std::string layer_id = MakeLayer(SmallLayer(kExperts, kTopK, kHidden, 6), /*seed=*/7);
  const auto forwards = Forwards(layer_id, world(), random);
  std::vector<v1::PrepareRequest> prepares(forwards.size());
  for (int64_t rank = 0; rank < world(); ++rank) {
    const auto r = static_cast<size_t>(rank);
    prepares[r].set_layer_id(layer_id);
    *prepares[r].mutable_topk_ids() = residency.Put(rank, "ids", forwards[r].topk().topk_ids());
  }
  const auto prepared = Run(std::move(prepares));
  ASSERT_EQ(prepared.size(), forwards.size());
  std::vector<v1::DispatchRequest> dispatches(forwards.size());
  std::vector<v1::CombineRequest> combines(forwards.size());
  for (size_t r = 0; r < forwards.size(); ++r) {
    dispatches[r].set_handle(prepared[r].handle());
    *dispatches[r].mutable_tokens() = forwards[r].tokens();
    *dispatches[r].mutable_topk_weights() = forwards[r].topk().topk_weights();
  }
  const auto received = Run(dispatches);
  ASSERT_EQ(received.size(), forwards.size());
  for (size_t r = 0; r < forwards.size(); ++r) {
    combines[r].set_handle(prepared[r].handle());
    *combines[r].mutable_expert_output() = received[r].recv_tokens();
    *combines[r].mutable_slot_weights() = received[r].recv_weights();
    const auto rank = static_cast<int64_t>(r);
    residency.Zeros(rank, "rx", received[r].recv_tokens(),
                    dispatches[r].mutable_recv_tokens_buffer());
    residency.Zeros(rank, "rw", received[r].recv_weights(),
                    dispatches[r].mutable_recv_weights_buffer());
  }
  const auto combined = Run(combines);
  const auto kept = Run(std::move(dispatches));
  ASSERT_EQ(combined.size(), forwards.size());
  ASSERT_EQ(kept.size(), forwards.size());
  for (size_t r = 0; r < forwards.size(); ++r) {
    const auto rank = static_cast<int64_t>(r);
    residency.Expect(rank, kept[r].recv_tokens(), received[r].recv_tokens());
    residency.Expect(rank, kept[r].recv_weights(), received[r].recv_weights());
    // What a response says of a buffer is what the next request says of it.
    *combines[r].mutable_expert_output() = kept[r].recv_tokens();
    *combines[r].mutable_slot_weights() = kept[r].recv_weights();
    residency.Zeros(rank, "y", combined[r].output(), combines[r].mutable_output_buffer());
  }
  const auto again = Run(std::move(combines));
  ASSERT_EQ(again.size(), forwards.size());
  for (size_t r = 0; r < forwards.size(); ++r) {
    residency.Expect(static_cast<int64_t>(r), again[r].output(), combined[r].output());
  }
  residency.ExpectNoneLeft();
}

TEST_P(ServiceTest, BadPutStreamsAreRefusedAndKeepNothing) {
  Residency residency(*this);
  using Messages = std::vector<v1::PutTensorRequest>;
  const auto changed = [](const std::function<void(v1::PutTensorRequest&)>& change) {
    v1::PutTensorRequest message = First(8);
    change(message);
    return message;
  };
  v1::PutTensorRequest overlap = Chunk(4);
  overlap.set_offset_bytes(2);
  v1::PutTensorRequest gap = Chunk(2);
  gap.set_offset_bytes(6);
  const uint64_t epoch = service().group().epoch();
  const std::vector<std::pair<Messages, Reason>> cases = {
      {{}, Reason::kConfigInvalid},
      {{Chunk(4)}, Reason::kConfigInvalid},
      {{changed([](auto& m) { m.clear_buffer_id(); })}, Reason::kConfigInvalid},
      {{changed([](auto& m) { m.set_buffer_id(std::string(300, 'i')); })}, Reason::kConfigInvalid},
      {{changed([](auto& m) { m.clear_tensor(); })}, Reason::kConfigInvalid},
      {{changed([](auto& m) { m.mutable_tensor()->set_dtype(v1::DTYPE_UNSPECIFIED); })},
       Reason::kDtypeUnsupported},
      {{changed([](auto& m) { m.mutable_tensor()->set_shape(0, -8); })}, Reason::kShapeMismatch},
      {{changed([](auto& m) {
         m.mutable_tensor()->set_shape(0, int64_t{1} << 62);
         m.mutable_tensor()->add_shape(4);
       })},
       Reason::kShapeMismatch},
      {{changed([](auto& m) { m.mutable_tensor()->set_data("12345678"); })},
       Reason::kPayloadSizeMismatch},
      {{changed([](auto& m) { m.mutable_tensor()->set_shape(0, int64_t{1} << 60); })},
       Reason::kMemoryBudget},
      {{changed([&](auto& m) { m.set_epoch(epoch - 1); })}, Reason::kEpochStale},
      {{changed([&](auto& m) { m.set_epoch(epoch + 1); })}, Reason::kEpochStale},
      {{First(8)}, Reason::kPayloadSizeMismatch},
      {{First(8), Chunk(7)}, Reason::kPayloadSizeMismatch},
      {{First(8), Chunk(9)}, Reason::kPayloadSizeMismatch},
      {{First(8), Chunk(8), Chunk(1)}, Reason::kPayloadSizeMismatch},
      {{First(8), Chunk(4), overlap}, Reason::kBufferRange},
      {{First(8), Chunk(4), gap}, Reason::kBufferRange},
      {{First(8), First(8)}, Reason::kConfigInvalid},
      {{First(8 * kMiB), Chunk(4 * kMiB + 1)}, Reason::kPayloadSizeMismatch},
      {{changed([](auto& m) { m.set_zeros(true); }), Chunk(8)}, Reason::kPayloadSizeMismatch}};
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(::testing::Message() << "case " << i);
    RawPut put(service().rank(0));
    for (const v1::PutTensorRequest& message : cases[i].first) put.writer->Write(message);
    const absl::Status status = put.Finish();
    EXPECT_TRUE(HasReason(status, cases[i].second)) << status;
    EXPECT_EQ(residency.List(0).tensors_size(), 0);
    residency.WaitForUsed(0, 0);
  }
}

TEST_P(ServiceTest, UnknownBufferInEveryFieldIsRefusedByNameAndTheGroupGoesOn) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  Residency residency(*this);
  const std::string layer_id = MakeLayer(SmallLayer(kExperts, kTopK, kHidden, 6), /*seed=*/7);
  const auto forwards = Forwards(layer_id, world(), random);
  const auto good = Run(forwards);
  ASSERT_EQ(good.size(), forwards.size());
  // The last rank's request is spoilt; it must name the buffer, and the others that rank.
  const auto expect = [&](const std::vector<absl::Status>& statuses, const std::string& path) {
    const absl::Status& own = statuses.back();
    EXPECT_TRUE(HasReason(own, Reason::kBufferUnknown)) << own;
    EXPECT_NE(StdView(own.message()).find(path), std::string_view::npos) << path << ": " << own;
    EXPECT_NE(StdView(own.message()).find("\"gone\""), std::string_view::npos) << own;
    for (size_t r = 0; r + 1 < statuses.size(); ++r) {
      EXPECT_TRUE(HasReason(statuses[r], Reason::kPeerRejected)) << statuses[r];
    }
  };
  using ForwardSpoiler = std::function<void(v1::ForwardRequest&)>;
  const std::vector<std::pair<std::string, ForwardSpoiler>> forward_fields = {
      {"tokens.buffer",
       [](auto& r) { client::SetBuffer("gone", r.mutable_tokens()->mutable_buffer()); }},
      {"topk.topk_ids.buffer",
       [](auto& r) {
         client::SetBuffer("gone", r.mutable_topk()->mutable_topk_ids()->mutable_buffer());
       }},
      {"topk.topk_weights.buffer",
       [](auto& r) {
         client::SetBuffer("gone", r.mutable_topk()->mutable_topk_weights()->mutable_buffer());
       }},
      {"output_buffer", [](auto& r) { client::SetBuffer("gone", r.mutable_output_buffer()); }}};
  for (const auto& [path, spoil] : forward_fields) {
    auto requests = forwards;
    spoil(requests.back());
    expect(driver().RunEach(std::move(requests)).statuses, path);
  }
  using BackwardSpoiler = std::function<void(v1::BackwardRequest&)>;
  const std::vector<std::pair<std::string, BackwardSpoiler>> backward_fields = {
      {"output_gradient.buffer",
       [](auto& r) { client::SetBuffer("gone", r.mutable_output_gradient()->mutable_buffer()); }},
      {"tokens_gradient_buffer",
       [](auto& r) { client::SetBuffer("gone", r.mutable_tokens_gradient_buffer()); }},
      {"topk_weights_gradient_buffer",
       [](auto& r) { client::SetBuffer("gone", r.mutable_topk_weights_gradient_buffer()); }},
      {"router_logits_gradient_buffer",
       [](auto& r) { client::SetBuffer("gone", r.mutable_router_logits_gradient_buffer()); }}};
  for (const auto& [path, spoil] : backward_fields) {
    auto requests = Backwards(good);
    spoil(requests.back());
    expect(driver().RunEach(std::move(requests)).statuses, path);
  }
  // The ticket has survived all of that.
  EXPECT_EQ(Run(Backwards(good)).size(), forwards.size());
  residency.ExpectNoneLeft();
}

TEST_P(ServiceTest, DisconnectInTheMiddleOfPutAndGetLeavesNoMemory) {
  Residency residency(*this);
  {
    RawPut put(service().rank(0));
    ASSERT_TRUE(put.writer->Write(First(64 * kMiB)));
    ASSERT_TRUE(put.writer->Write(Chunk(kMiB)));
    residency.WaitForUsed(0, 64 * kMiB);
    put.context.TryCancel();
    EXPECT_TRUE(HasReason(put.Finish(), Reason::kCancelled));
  }
  residency.WaitForUsed(0, 0);
  v1::Tensor zeros;
  zeros.set_dtype(v1::DTYPE_F8E5M2);
  zeros.add_shape(64 * kMiB);
  residency.Put(0, "t", zeros);
  {
    RawPut raw(service().rank(0));
    grpc::ClientContext context;
    v1::GetTensorRequest request;
    client::SetBuffer("t", request.mutable_buffer());
    auto reader = raw.stub->GetTensor(&context, request);
    v1::GetTensorResponse chunk;
    EXPECT_TRUE(reader->Read(&chunk));
    context.TryCancel();
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
    (void)raw.Finish();
  }
  residency.ExpectNoneLeft();
}

TEST_P(ServiceTest, ManyClientsStayWithinTheMemoryLimit) {
  TestRandom random;
  Residency residency(*this);
  const int64_t quarter = residency.List(0).limit_bytes() / 4;
  ASSERT_GT(quarter, 0);
  // Room is set aside before the first byte comes, and none of it is touched before that.
  std::vector<std::unique_ptr<RawPut>> puts;
  for (int64_t i = 0; i < 4; ++i) {
    puts.push_back(std::make_unique<RawPut>(service().rank(0)));
    ASSERT_TRUE(puts.back()->writer->Write(First(quarter)));
    residency.WaitForUsed(0, (i + 1) * quarter);
  }
  for (int i = 0; i < 8; ++i) {
    RawPut put(service().rank(0));
    put.writer->Write(First(quarter));
    const absl::Status status = put.Finish();
    EXPECT_TRUE(HasReason(status, Reason::kMemoryBudget)) << status;
    EXPECT_NE(StdView(status.message()).find("--tensor_memory_bytes"), std::string_view::npos)
        << status;
  }
  EXPECT_EQ(residency.List(0).used_bytes(), 4 * quarter);
  for (auto& put : puts) put->context.TryCancel();
  for (auto& put : puts) EXPECT_TRUE(HasReason(put->Finish(), Reason::kCancelled));
  residency.WaitForUsed(0, 0);

  const v1::Tensor tensor = Bytes(random, v1::DTYPE_F8E5M2, {3 * kMiB});
  std::vector<std::thread> clients;
  for (int c = 0; c < 4; ++c) {
    clients.emplace_back([&, c] {
      const std::string id = StrCat("t", c);
      for (int round = 0; round < 2; ++round) {
        residency.Expect(0, residency.Put(0, id, tensor), tensor);
        EXPECT_TRUE(residency.Delete(0, id).ok());
      }
    });
  }
  for (std::thread& client : clients) client.join();
  residency.ExpectNoneLeft();
}

TEST_P(ServiceTest, NextEpochRefusesTheTensorsOfTheLast) {
  Residency residency(*this);
  v1::Tensor zeros;
  zeros.set_dtype(v1::DTYPE_F32);
  zeros.add_shape(4);
  residency.Put(0, "old", zeros);
  const uint64_t epoch = service().group().epoch();
  service().Forget();
  UseGroup(DefaultGroup());
  const absl::Status gone = service().rank(0).GetTensor("old", Limit()).status();
  EXPECT_TRUE(HasReason(gone, Reason::kBufferUnknown)) << gone;
  EXPECT_NE(StdView(gone.message()).find(StrCat("it belonged to epoch ", epoch)),
            std::string_view::npos)
      << gone;
  EXPECT_EQ(residency.List(0).used_bytes(), 0);
}

}  // namespace
}  // namespace expertd::conformance
