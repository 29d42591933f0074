// What the cases of resident tensors share: hand-made streams, and what is stored before and after.
#ifndef TESTS_CONFORMANCE_SERVICE_TENSOR_CASES_H_
#define TESTS_CONFORMANCE_SERVICE_TENSOR_CASES_H_

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

using reference::TestRandom;

inline constexpr int64_t kMiB = int64_t{1} << 20;
inline constexpr int64_t kExperts = 24;  // divides among every world size of the suite
inline constexpr int64_t kHidden = 12;   // rows of 48 bytes: GPUs want multiples of 16
inline constexpr int64_t kTopK = 3;

inline absl::Time Limit() { return absl::Now() + testing::kWait; }

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

inline v1::PutTensorRequest First(int64_t bytes) {
  v1::PutTensorRequest message;
  message.set_buffer_id("t");
  message.mutable_tensor()->set_dtype(v1::DTYPE_F8E5M2);
  message.mutable_tensor()->add_shape(bytes);
  return message;
}

inline v1::PutTensorRequest Chunk(int64_t bytes) {
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

inline v1::Tensor Bytes(TestRandom& random, v1::DType dtype, const client::Shape& shape) {
  v1::Tensor tensor;
  tensor.set_dtype(dtype);
  tensor.mutable_shape()->Assign(shape.begin(), shape.end());
  std::string data(static_cast<size_t>(client::PayloadBytes(tensor)), '\0');
  for (char& byte : data) byte = static_cast<char>(random.Integer(0, 255));
  tensor.set_data(std::move(data));
  return tensor;
}

}  // namespace expertd::conformance

#endif  // TESTS_CONFORMANCE_SERVICE_TENSOR_CASES_H_
