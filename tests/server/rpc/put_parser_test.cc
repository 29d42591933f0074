// Tests of PutTensor streams: every way the messages can be wrong, each named by its field.
#include "server/rpc/put_parser.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/strings.h"

namespace expertd::rpc {
namespace {

v1::PutTensorRequest First(std::vector<int64_t> shape = {2, 3}, v1::DType dtype = v1::DTYPE_F32) {
  v1::PutTensorRequest message;
  message.set_buffer_id("x");
  message.mutable_tensor()->set_dtype(dtype);
  message.mutable_tensor()->mutable_shape()->Assign(shape.begin(), shape.end());
  return message;
}

v1::PutTensorRequest Chunk(size_t bytes) {
  v1::PutTensorRequest message;
  message.set_chunk(std::string(bytes, 'c'));
  return message;
}

v1::PutTensorRequest ChunkAt(uint64_t offset, size_t bytes) {
  v1::PutTensorRequest message = Chunk(bytes);
  message.set_offset_bytes(offset);
  return message;
}

struct Expected {
  Reason reason;
  std::string path;
};

// The last of the messages is refused for this, those before it are taken.
void ExpectRefused(std::vector<v1::PutTensorRequest> messages, const Expected& want) {
  PutParser parser;
  for (size_t i = 0; i + 1 < messages.size(); ++i) {
    const auto piece = parser.Accept(messages[i]);
    ASSERT_TRUE(piece.ok()) << piece.status();
  }
  const absl::Status status = parser.Accept(messages.back()).status();
  EXPECT_TRUE(HasReason(status, want.reason)) << status;
  ASSERT_FALSE(DetailOf(status).violations.empty()) << status;
  EXPECT_EQ(DetailOf(status).violations.front().path, want.path) << status;
}

TEST(PutParserTest, ChunksFollowEachOther) {
  PutParser parser;
  v1::PutTensorRequest message = First();
  message.set_epoch(7);
  message.set_chunk("abcd");
  auto piece = parser.Accept(message);
  ASSERT_TRUE(piece.ok()) << piece.status();
  EXPECT_EQ(piece->offset, 0);
  EXPECT_EQ(piece->bytes, "abcd");
  EXPECT_TRUE(parser.begun());
  EXPECT_EQ(parser.info().bytes, 24);
  EXPECT_EQ(parser.info().epoch, 7u);
  EXPECT_EQ(parser.info().shape, (std::vector<int64_t>{2, 3}));
  EXPECT_FALSE(parser.End().ok());
  for (v1::PutTensorRequest next : {Chunk(0), ChunkAt(4, 8), Chunk(12)}) {
    piece = parser.Accept(next);
    ASSERT_TRUE(piece.ok()) << piece.status();
  }
  EXPECT_EQ(piece->offset, 12);
  EXPECT_TRUE(parser.End().ok());
}

TEST(PutParserTest, ZeroRowsAndZerosNeedNoChunk) {
  PutParser empty;
  v1::PutTensorRequest message = First({0, 1 << 30}, v1::DTYPE_I64);
  ASSERT_TRUE(empty.Accept(message).ok());
  EXPECT_TRUE(empty.End().ok());
  PutParser zeros;
  message = First({1 << 20, 1 << 20});
  message.set_zeros(true);
  ASSERT_TRUE(zeros.Accept(message).ok());
  EXPECT_EQ(zeros.fill(), engine::TensorStore::Fill::kZeros);
  EXPECT_TRUE(zeros.End().ok());
  v1::PutTensorRequest chunk = Chunk(1);
  EXPECT_TRUE(HasReason(zeros.Accept(chunk).status(), Reason::kPayloadSizeMismatch));
}

TEST(PutParserTest, FirstMessageIsChecked) {
  v1::PutTensorRequest message = First();
  message.clear_buffer_id();
  ExpectRefused({message}, {Reason::kConfigInvalid, "buffer_id"});
  message.set_buffer_id(std::string(257, 'i'));
  ExpectRefused({message}, {Reason::kConfigInvalid, "buffer_id"});
  message = First();
  message.clear_tensor();
  ExpectRefused({message}, {Reason::kConfigInvalid, "tensor"});
  for (const int dtype : {0, 8, 99, -1}) {
    ExpectRefused({First({1}, static_cast<v1::DType>(dtype))},
                  {Reason::kDtypeUnsupported, "tensor.dtype"});
  }
  ExpectRefused({First({2, -1})}, {Reason::kShapeMismatch, "tensor.shape[1]"});
  ExpectRefused({First(std::vector<int64_t>(9, 1))}, {Reason::kShapeMismatch, "tensor.shape"});
  ExpectRefused({First({int64_t{1} << 40, int64_t{1} << 40})},
                {Reason::kShapeMismatch, "tensor.shape"});
  ExpectRefused({First({std::numeric_limits<int64_t>::max()}, v1::DTYPE_I32)},
                {Reason::kShapeMismatch, "tensor.shape"});
  message = First();
  message.mutable_tensor()->set_data(std::string(24, 'x'));
  ExpectRefused({message}, {Reason::kPayloadSizeMismatch, "tensor"});
  message = First();
  message.mutable_tensor()->mutable_buffer()->set_buffer_id("y");
  ExpectRefused({message}, {Reason::kPayloadSizeMismatch, "tensor"});
}

TEST(PutParserTest, AllProblemsOfTheFirstMessageAreReported) {
  v1::PutTensorRequest message = First({-1, -2}, v1::DTYPE_UNSPECIFIED);
  message.clear_buffer_id();
  PutParser parser;
  const absl::Status status = parser.Accept(message).status();
  EXPECT_EQ(DetailOf(status).violations.size(), 4u) << status;
  EXPECT_FALSE(parser.begun());
}

TEST(PutParserTest, OrderIsKept) {
  ExpectRefused({First(), ChunkAt(4, 4)}, {Reason::kBufferRange, "offset_bytes"});
  ExpectRefused({First(), Chunk(8), ChunkAt(4, 4)}, {Reason::kBufferRange, "offset_bytes"});
  ExpectRefused({First(), Chunk(8), ChunkAt(12, 4)}, {Reason::kBufferRange, "offset_bytes"});
  ExpectRefused({First(), ChunkAt(std::numeric_limits<uint64_t>::max(), 4)},
                {Reason::kBufferRange, "offset_bytes"});
  v1::PutTensorRequest first = First();
  first.set_offset_bytes(1);
  ExpectRefused({first}, {Reason::kBufferRange, "offset_bytes"});
}

TEST(PutParserTest, TooMuchIsRefusedAtOnce) {
  ExpectRefused({First(), Chunk(25)}, {Reason::kPayloadSizeMismatch, "chunk"});
  ExpectRefused({First(), Chunk(24), Chunk(1)}, {Reason::kPayloadSizeMismatch, "chunk"});
  ExpectRefused({First({1 << 24}), Chunk(kMaxPutChunkBytes + 1)},
                {Reason::kPayloadSizeMismatch, "chunk"});
  PutParser parser;
  v1::PutTensorRequest first = First({1 << 24});
  ASSERT_TRUE(parser.Accept(first).ok());
  v1::PutTensorRequest largest = Chunk(kMaxPutChunkBytes);
  EXPECT_TRUE(parser.Accept(largest).ok());
}

TEST(PutParserTest, TooLittleIsRefusedAtTheEnd) {
  PutParser parser;
  EXPECT_TRUE(HasReason(parser.End(), Reason::kConfigInvalid));
  v1::PutTensorRequest message = First();
  ASSERT_TRUE(parser.Accept(message).ok());
  v1::PutTensorRequest chunk = Chunk(23);
  ASSERT_TRUE(parser.Accept(chunk).ok());
  const absl::Status status = parser.End();
  EXPECT_TRUE(HasReason(status, Reason::kPayloadSizeMismatch));
  EXPECT_NE(StdView(status.message()).find("got 23 bytes in all, need 24"), std::string_view::npos)
      << status;
}

TEST(PutParserTest, HeaderFieldsBelongToTheFirstMessage) {
  v1::PutTensorRequest again = Chunk(4);
  again.set_buffer_id("x");
  ExpectRefused({First(), again}, {Reason::kConfigInvalid, "tensor"});
  again = Chunk(4);
  again.mutable_tensor();
  ExpectRefused({First(), again}, {Reason::kConfigInvalid, "tensor"});
  again = Chunk(4);
  again.set_epoch(1);
  ExpectRefused({First(), again}, {Reason::kConfigInvalid, "tensor"});
  again = Chunk(0);
  again.set_zeros(true);
  ExpectRefused({First(), again}, {Reason::kConfigInvalid, "tensor"});
}

}  // namespace
}  // namespace expertd::rpc
