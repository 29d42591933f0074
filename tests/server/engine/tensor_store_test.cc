// Tests of the tensor store: names, limits, what is kept and when memory comes back.
#include "server/engine/tensor_store.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/strings.h"
#include "kernels/cpu/cpu_device.h"

namespace expertd::engine {
namespace {

using Fill = TensorStore::Fill;

class TensorStoreTest : public testing::Test {
 protected:
  TensorStoreTest() { store_.Begin(5); }

  static TensorInfo Info(std::string id, int64_t bytes, uint64_t epoch = 5) {
    return {std::move(id), DType::kF8E5M2, {bytes}, bytes, epoch};
  }
  // Stores a tensor of these bytes.
  void Put(const std::string& id, const std::string& bytes) {
    const auto stream = store_.Reserve(Info(id, static_cast<int64_t>(bytes.size())), Fill::kChunks);
    ASSERT_TRUE(stream.ok()) << stream.status();
    ASSERT_TRUE(store_.Write(*stream, 0, bytes, device_).ok());
    ASSERT_TRUE(store_.Commit(*stream, device_).ok());
  }
  std::string Get(const std::string& id) {
    const auto tensor = store_.Find(id);
    if (!tensor.ok()) return "none";
    return {(*tensor)->memory.as<char>(), static_cast<size_t>((*tensor)->info.bytes)};
  }

  CpuDevice device_{1 << 20};
  TensorStore store_{{.limit_bytes = 1000, .max_streams = 3}};
};

TEST_F(TensorStoreTest, TensorIsThereOnceItIsCommitted) {
  const auto stream = store_.Reserve(Info("a", 6), Fill::kChunks);
  ASSERT_TRUE(stream.ok());
  EXPECT_EQ(store_.GetUsage().bytes, 6);
  EXPECT_EQ(store_.GetUsage().tensors, 0);
  ASSERT_TRUE(store_.Write(*stream, 0, "abc", device_).ok());
  ASSERT_TRUE(store_.Write(*stream, 3, "def", device_).ok());
  EXPECT_EQ(Get("a"), "none");
  const auto info = store_.Commit(*stream, device_);
  ASSERT_TRUE(info.ok());
  EXPECT_EQ(info->epoch, 5u);
  EXPECT_EQ(Get("a"), "abcdef");
  EXPECT_EQ(store_.List().size(), 1u);
  EXPECT_FALSE(store_.Commit(*stream, device_).ok()) << "a stream ends once";
}

TEST_F(TensorStoreTest, ZerosAreZeroAlsoInReusedMemory) {
  Put("a", std::string(300, 'x'));
  ASSERT_TRUE(store_.Erase("a").ok());
  store_.Sweep();
  const auto stream = store_.Reserve(Info("z", 300), Fill::kZeros);
  ASSERT_TRUE(stream.ok());
  ASSERT_TRUE(store_.Commit(*stream, device_).ok());
  EXPECT_EQ(Get("z"), std::string(300, '\0'));
}

TEST_F(TensorStoreTest, EmptyTensorIsATensor) {
  Put("empty", "");
  const auto tensor = store_.Find("empty");
  ASSERT_TRUE(tensor.ok());
  EXPECT_NE((*tensor)->memory.data(), nullptr);
}

TEST_F(TensorStoreTest, LimitCountsTensorsStreamsAndWhatStepsHold) {
  Put("a", std::string(400, 'a'));
  const auto stream = store_.Reserve(Info("b", 300), Fill::kChunks);
  ASSERT_TRUE(stream.ok());
  TensorPtr held = *store_.Find("a");
  ASSERT_TRUE(store_.Erase("a").ok());
  EXPECT_EQ(store_.GetUsage().bytes, 700);

  const absl::Status over = store_.Reserve(Info("c", 301), Fill::kChunks).status();
  EXPECT_TRUE(HasReason(over, Reason::kMemoryBudget)) << over;
  for (const char* part : {"301", "700", "1000", "--tensor_memory_bytes", "\"c\""}) {
    EXPECT_NE(StdView(over.message()).find(part), std::string_view::npos) << part << ": " << over;
  }
  EXPECT_TRUE(store_.Reserve(Info("c", 300), Fill::kChunks).ok()) << "exactly the limit";
  EXPECT_EQ(store_.GetUsage().bytes, 1000);
  held.reset();
  EXPECT_EQ(store_.GetUsage().bytes, 600);
  store_.Cancel(*stream);
  EXPECT_EQ(store_.GetUsage().bytes, 300);
}

TEST_F(TensorStoreTest, HugeSizesDoNotOverflowTheLimit) {
  Put("a", "x");
  const absl::Status over =
      store_.Reserve(Info("c", std::numeric_limits<int64_t>::max()), Fill::kZeros).status();
  EXPECT_TRUE(HasReason(over, Reason::kMemoryBudget)) << over;
}

TEST_F(TensorStoreTest, StreamsAtOnceAreBounded) {
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(store_.Reserve(Info("a", 1), Fill::kChunks).ok());
  const absl::Status full = store_.Reserve(Info("a", 1), Fill::kChunks).status();
  EXPECT_TRUE(HasReason(full, Reason::kQueueFull)) << full;
  EXPECT_NE(StdView(full.message()).find("--queue_capacity"), std::string_view::npos) << full;
  EXPECT_EQ(store_.GetUsage().bytes, 3);
}

TEST_F(TensorStoreTest, ReplacedTensorLivesOnForThoseWhoHoldIt) {
  Put("a", "old");
  const TensorPtr old = *store_.Find("a");
  const uint64_t version = old->version;
  Put("a", "newer");
  EXPECT_EQ(Get("a"), "newer");
  EXPECT_EQ(std::string(old->memory.as<char>(), 3), "old");
  EXPECT_NE((*store_.Find("a"))->version, version);
  EXPECT_EQ(store_.List().size(), 1u);
  EXPECT_EQ(store_.GetUsage().bytes, 8);
}

TEST_F(TensorStoreTest, UnknownTensorIsNamedWithEpochs) {
  const absl::Status unknown = store_.Find("no\nsuch").status();
  EXPECT_TRUE(HasReason(unknown, Reason::kBufferUnknown)) << unknown;
  EXPECT_NE(StdView(unknown.message()).find("\"no\\nsuch\" in epoch 5"), std::string_view::npos)
      << unknown;
  EXPECT_TRUE(HasReason(store_.Erase("no"), Reason::kBufferUnknown));
}

TEST_F(TensorStoreTest, EpochTakesItsTensorsAndStreamsAlong) {
  Put("a", std::string(400, 'a'));
  const auto stream = store_.Reserve(Info("b", 300), Fill::kChunks);
  ASSERT_TRUE(store_.Write(*stream, 0, "b", device_).ok());
  store_.Begin(6);
  EXPECT_EQ(store_.GetUsage().bytes, 0);
  EXPECT_TRUE(HasReason(store_.Write(*stream, 1, "b", device_), Reason::kEpochStale));
  EXPECT_TRUE(HasReason(store_.Commit(*stream, device_).status(), Reason::kEpochStale));
  EXPECT_TRUE(
      HasReason(store_.Reserve(Info("c", 1, 5), Fill::kChunks).status(), Reason::kEpochStale));
  const absl::Status gone = store_.Find("a").status();
  EXPECT_TRUE(HasReason(gone, Reason::kBufferUnknown));
  EXPECT_NE(StdView(gone.message()).find("it belonged to epoch 5"), std::string_view::npos) << gone;
}

TEST_F(TensorStoreTest, MemoryComesBackOnTheThreadThatSweeps) {
  Put("a", std::string(400, 'a'));
  TensorPtr held = *store_.Find("a");
  const void* block = held->memory.data();
  ASSERT_TRUE(store_.Erase("a").ok());
  std::thread([&held] { held.reset(); }).join();
  // Not before Sweep: the pool belongs to the device thread.
  EXPECT_NE(device_.Allocate(400)->data(), block);
  store_.Sweep();
  EXPECT_EQ(device_.Allocate(400)->data(), block);
}

TEST_F(TensorStoreTest, DeviceWithoutMemoryIsAnErrorThatKeepsNothing) {
  CpuDevice small(256);
  const auto stream = store_.Reserve(Info("a", 900), Fill::kChunks);
  const absl::Status status = store_.Write(*stream, 0, "a", small);
  EXPECT_TRUE(HasReason(status, Reason::kMemoryBudget)) << status;
  store_.Cancel(*stream);
  EXPECT_EQ(store_.GetUsage().bytes, 0);
}

TEST_F(TensorStoreTest, ChunkOutsideOfItsTensorIsRefused) {
  const auto stream = store_.Reserve(Info("a", 4), Fill::kChunks);
  for (const int64_t offset : {int64_t{-1}, int64_t{3}, int64_t{5}}) {
    EXPECT_TRUE(HasReason(store_.Write(*stream, offset, "xy", device_), Reason::kInternal));
  }
}

}  // namespace
}  // namespace expertd::engine
