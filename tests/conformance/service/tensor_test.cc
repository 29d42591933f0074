// Resident tensors through the service: what is stored, what comes back, what is refused.
#include "tests/conformance/service/tensor_cases.h"

namespace expertd::conformance {
namespace {

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
