// Tests of the tensor streams over real gRPC and a fake engine: how far they run ahead, how they
// end.
#include "server/rpc/tensor_stream.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/mutex.h"
#include "expertd/v1/tensor_service.grpc.pb.h"
#include "grpcpp/create_channel.h"
#include "server/rpc/server.h"
#include "server/rpc/status.h"
#include "tests/server/rpc/fake_engine.h"

namespace expertd::rpc {
namespace {

using std::chrono::seconds;
using std::chrono::system_clock;

constexpr int64_t kMiB = int64_t{1} << 20;

class TensorStreamTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ServerOptions options;
    options.listen = "127.0.0.1:0";
    options.identity.max_receive_message_bytes = 16 << 20;
    options.identity.tensor_memory_bytes = 77;
    absl::StatusOr<std::unique_ptr<Server>> server = Server::Create(options, engine_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    stub_ = v1::TensorService::NewStub(
        grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials()));
    context_.set_deadline(system_clock::now() + seconds(20));
  }

  // Makes the engine know a tensor of bytes.
  void Know(int64_t bytes) {
    engine_.on_find_tensor = [bytes](const std::string& id) {
      return engine::TensorState{{id, DType::kF8E5M2, {bytes}, bytes, 3}, 9};
    };
  }
  static v1::GetTensorRequest Get(uint64_t offset = 0, uint64_t size = 0) {
    v1::GetTensorRequest request;
    request.mutable_buffer()->set_buffer_id("x");
    request.mutable_buffer()->set_offset_bytes(offset);
    request.set_size_bytes(size);
    return request;
  }
  static v1::PutTensorRequest First(int64_t bytes) {
    v1::PutTensorRequest message;
    message.set_buffer_id("x");
    message.mutable_tensor()->set_dtype(v1::DTYPE_F8E5M2);
    message.mutable_tensor()->add_shape(bytes);
    return message;
  }
  static v1::PutTensorRequest Chunk(int64_t bytes) {
    v1::PutTensorRequest message;
    message.set_chunk(std::string(static_cast<size_t>(bytes), 'c'));
    return message;
  }
  static void WaitUntil(const std::function<bool()>& holds) {
    const auto end = system_clock::now() + seconds(20);
    while (!holds()) {
      ASSERT_LT(system_clock::now(), end) << "the condition never became true";
      std::this_thread::yield();
    }
  }

  FakeEngine engine_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<v1::TensorService::Stub> stub_;
  grpc::ClientContext context_;
};

TEST_F(TensorStreamTest, GetNumbersItsChunksAndKeepsToThePart) {
  const int64_t chunk = static_cast<int64_t>(kTensorChunkBytes);
  Know(4 * chunk);
  engine_.on_read_tensor = [](const engine::TensorRead& read) {
    EXPECT_EQ(read.buffer_id, "x");
    EXPECT_EQ(read.version, 9u);
    return std::string(static_cast<size_t>(read.size), static_cast<char>('a' + read.offset % 7));
  };
  auto reader = stub_->GetTensor(&context_, Get(5, static_cast<uint64_t>(2 * chunk + 3)));
  v1::GetTensorResponse message;
  int64_t at = 5;
  int messages = 0;
  while (reader->Read(&message)) {
    EXPECT_EQ(message.has_tensor(), messages++ == 0);
    EXPECT_EQ(message.offset_bytes(), static_cast<uint64_t>(at));
    ASSERT_FALSE(message.chunk().empty());
    EXPECT_EQ(message.chunk()[0], static_cast<char>('a' + at % 7));
    at += static_cast<int64_t>(message.chunk().size());
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(messages, 3);
  EXPECT_EQ(at, 5 + 2 * chunk + 3);
}

TEST_F(TensorStreamTest, EmptyTensorIsOneMessage) {
  Know(0);
  auto reader = stub_->GetTensor(&context_, Get());
  v1::GetTensorResponse message;
  EXPECT_TRUE(reader->Read(&message));
  EXPECT_EQ(message.tensor().shape(0), 0);
  EXPECT_FALSE(reader->Read(&message));
  EXPECT_TRUE(reader->Finish().ok());
}

TEST_F(TensorStreamTest, SlowReaderHoldsTheDaemonBack) {
  Know(4096 * kMiB);
  std::atomic<int64_t> read_bytes{0};
  engine_.on_read_tensor = [&](const engine::TensorRead& read) {
    read_bytes += read.size;
    return std::string(static_cast<size_t>(read.size), 'x');
  };
  auto reader = stub_->GetTensor(&context_, Get());
  v1::GetTensorResponse message;
  ASSERT_TRUE(reader->Read(&message));
  // Time for it to run ahead, while the daemon answers other calls. The connection and the client's
  // own window take some; of 4 GiB they cannot take much.
  for (int i = 0; i < 300; ++i) {
    grpc::ClientContext context;
    v1::ListTensorsResponse list;
    ASSERT_TRUE(stub_->ListTensors(&context, {}, &list).ok());
  }
  EXPECT_LT(read_bytes, 64 * kMiB);
  context_.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(TensorStreamTest, FailureInTheMiddleEndsTheStreamWithItsReason) {
  Know(64 * kMiB);
  engine_.on_read_tensor = [](const engine::TensorRead& read) -> absl::StatusOr<std::string> {
    if (read.offset > 0) return Error(Reason::kVersionBehind).Text("written to meanwhile");
    return std::string(static_cast<size_t>(read.size), 'x');
  };
  auto reader = stub_->GetTensor(&context_, Get());
  v1::GetTensorResponse message;
  while (reader->Read(&message)) {
  }
  EXPECT_EQ(ReasonOf(FromGrpc(reader->Finish())), Reason::kVersionBehind);
}

TEST_F(TensorStreamTest, PartMustBeInsideAndOfWholeElements) {
  const engine::TensorInfo info{"x", DType::kF32, {4}, 16, 1};
  EXPECT_EQ(PartOf(Get(), info)->end, 16);
  EXPECT_EQ(PartOf(Get(16), info)->begin, 16);
  EXPECT_EQ(PartOf(Get(4, 8), info)->end, 12);
  for (const auto& [offset, size] : std::initializer_list<std::pair<uint64_t, uint64_t>>{
           {20, 0}, {4, 16}, {~uint64_t{0} - 3, 4}, {8, ~uint64_t{0} - 7}, {2, 4}, {4, 2}}) {
    const absl::Status status = PartOf(Get(offset, size), info).status();
    EXPECT_TRUE(HasReason(status, Reason::kBufferRange))
        << offset << ", " << size << ": " << status;
  }
}

TEST_F(TensorStreamTest, GetWithoutAnIdOrOfAnUnknownOneIsRefused) {
  v1::GetTensorResponse message;
  auto reader = stub_->GetTensor(&context_, {});
  EXPECT_FALSE(reader->Read(&message));
  EXPECT_EQ(ReasonOf(FromGrpc(reader->Finish())), Reason::kBufferUnknown);
  grpc::ClientContext context;
  reader = stub_->GetTensor(&context, Get());
  EXPECT_FALSE(reader->Read(&message));
  EXPECT_EQ(ReasonOf(FromGrpc(reader->Finish())), Reason::kBufferUnknown);
}

// Keeps the engine's answers back.
struct HeldWrites {
  Mutex mutex;
  std::deque<std::function<void(absl::Status)>> waiting ABSL_GUARDED_BY(mutex);

  size_t size() {
    MutexLock lock(mutex);
    return waiting.size();
  }
  void AnswerOne(const absl::Status& status) {
    std::function<void(absl::Status)> done;
    {
      MutexLock lock(mutex);
      done = std::move(waiting.front());
      waiting.pop_front();
    }
    done(status);
  }
};

TEST_F(TensorStreamTest, SlowDeviceHoldsTheCallerBack) {
  HeldWrites held;
  std::atomic<int> written{0};
  engine_.on_write_tensor = [&](const std::string&, auto done) {
    ++written;
    MutexLock lock(held.mutex);
    held.waiting.push_back(std::move(done));
  };
  v1::PutTensorResponse response;
  auto writer = stub_->PutTensor(&context_, &response);
  ASSERT_TRUE(writer->Write(First(6 * kMiB)));
  std::thread caller([&] {
    for (int i = 0; i < 6; ++i) EXPECT_TRUE(writer->Write(Chunk(kMiB)));
    writer->WritesDone();
  });
  for (int answered = 0; answered < 6; ++answered) {
    WaitUntil([&] { return held.size() == 2 || written == 6; });
    EXPECT_LE(held.size(), 2u);
    held.AnswerOne(absl::OkStatus());
  }
  caller.join();
  EXPECT_TRUE(writer->Finish().ok());
}

TEST_F(TensorStreamTest, FailedWriteEndsTheStreamOnceAndForgetsTheTensor) {
  HeldWrites held;
  std::atomic<int> cancelled{0};
  engine_.on_cancel_tensor = [&](uint64_t store) { cancelled += store == 1 ? 1 : 100; };
  engine_.on_finish_tensor = []() -> absl::StatusOr<engine::TensorInfo> {
    ADD_FAILURE() << "committed";
    return engine::TensorInfo{};
  };
  engine_.on_write_tensor = [&](const std::string&, auto done) {
    MutexLock lock(held.mutex);
    held.waiting.push_back(std::move(done));
  };
  v1::PutTensorResponse response;
  auto writer = stub_->PutTensor(&context_, &response);
  ASSERT_TRUE(writer->Write(First(8)));
  ASSERT_TRUE(writer->Write(Chunk(4)));
  ASSERT_TRUE(writer->Write(Chunk(4)));
  WaitUntil([&] { return held.size() == 2; });
  held.AnswerOne(Error(Reason::kMemoryBudget).Text("no memory"));
  held.AnswerOne(absl::OkStatus());
  EXPECT_EQ(ReasonOf(FromGrpc(writer->Finish())), Reason::kMemoryBudget);
  EXPECT_EQ(cancelled, 1);
}

TEST_F(TensorStreamTest, FailedWriteEndsAStreamThatWaitsForItsCaller) {
  std::atomic<int> cancelled{0};
  engine_.on_cancel_tensor = [&](uint64_t) { ++cancelled; };
  engine_.on_write_tensor = [](const std::string&, const auto& done) {
    done(Error(Reason::kMemoryBudget).Text("no memory"));
  };
  v1::PutTensorResponse response;
  auto writer = stub_->PutTensor(&context_, &response);
  ASSERT_TRUE(writer->Write(First(8)));
  ASSERT_TRUE(writer->Write(Chunk(4)));
  // The caller sends nothing more, and does not end the stream either.
  EXPECT_EQ(ReasonOf(FromGrpc(writer->Finish())), Reason::kMemoryBudget);
  EXPECT_EQ(cancelled, 1);
}

TEST_F(TensorStreamTest, CallerThatGoesAwayKeepsNothing) {
  std::atomic<int> cancelled{0};
  engine_.on_cancel_tensor = [&](uint64_t) { ++cancelled; };
  engine_.on_finish_tensor = []() -> absl::StatusOr<engine::TensorInfo> {
    ADD_FAILURE() << "committed";
    return engine::TensorInfo{};
  };
  v1::PutTensorResponse response;
  auto writer = stub_->PutTensor(&context_, &response);
  ASSERT_TRUE(writer->Write(First(8)));
  ASSERT_TRUE(writer->Write(Chunk(4)));
  context_.TryCancel();
  EXPECT_EQ(writer->Finish().error_code(), grpc::StatusCode::CANCELLED);
  // It may have left before the daemon had read anything: then there is nothing to forget.
  server_->Shutdown(Clock::Real().Now() + seconds(20));
  EXPECT_LE(cancelled, 1);
}

TEST_F(TensorStreamTest, RefusedStreamsSayWhyAndReserveNothing) {
  engine_.on_cancel_tensor = [](uint64_t) { ADD_FAILURE() << "nothing was reserved"; };
  v1::PutTensorResponse response;
  {
    auto writer = stub_->PutTensor(&context_, &response);
    writer->WritesDone();
    EXPECT_EQ(ReasonOf(FromGrpc(writer->Finish())), Reason::kConfigInvalid);
  }
  {
    grpc::ClientContext context;
    auto writer = stub_->PutTensor(&context, &response);
    writer->Write(Chunk(4));
    EXPECT_EQ(ReasonOf(FromGrpc(writer->Finish())), Reason::kConfigInvalid);
  }
  engine_.on_begin_tensor = [](const engine::TensorInfo&) -> absl::StatusOr<uint64_t> {
    return Error(Reason::kMemoryBudget).Text("no room");
  };
  grpc::ClientContext context;
  auto writer = stub_->PutTensor(&context, &response);
  writer->Write(First(8));
  EXPECT_EQ(ReasonOf(FromGrpc(writer->Finish())), Reason::kMemoryBudget);
}

TEST_F(TensorStreamTest, EarlyEndForgetsTheTensor) {
  std::atomic<int> cancelled{0};
  engine_.on_cancel_tensor = [&](uint64_t) { ++cancelled; };
  v1::PutTensorResponse response;
  auto writer = stub_->PutTensor(&context_, &response);
  writer->Write(First(8));
  writer->Write(Chunk(7));
  writer->WritesDone();
  EXPECT_EQ(ReasonOf(FromGrpc(writer->Finish())), Reason::kPayloadSizeMismatch);
  EXPECT_EQ(cancelled, 1);
}

TEST_F(TensorStreamTest, ListShowsTheLimit) {
  v1::ListTensorsResponse response;
  ASSERT_TRUE(stub_->ListTensors(&context_, {}, &response).ok());
  EXPECT_EQ(response.limit_bytes(), 77);
}

}  // namespace
}  // namespace expertd::rpc
