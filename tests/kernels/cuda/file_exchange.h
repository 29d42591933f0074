// A bootstrap exchange between the processes of a test, through files of one folder.
#ifndef TESTS_KERNELS_CUDA_FILE_EXCHANGE_H_
#define TESTS_KERNELS_CUDA_FILE_EXCHANGE_H_

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/strings.h"
#include "kernels/ep_backend.h"

namespace expertd::conformance {

class FileExchange final : public BootstrapExchange {
 public:
  FileExchange(std::filesystem::path folder, int64_t rank, int64_t world)
      : folder_(std::move(folder)), rank_(rank), world_(world) {}

  absl::StatusOr<std::vector<std::string>> AllGather(std::string_view stage, std::string_view blob,
                                                     SteadyTime deadline) override {
    std::string name(stage);
    std::replace(name.begin(), name.end(), '/', '_');
    const auto path = [&](int64_t rank) { return folder_ / StrCat(name, ".", rank); };
    const std::filesystem::path part = folder_ / StrCat("part.", rank_);
    std::ofstream(part, std::ios::binary)
        .write(blob.data(), static_cast<std::streamsize>(blob.size()));
    std::filesystem::rename(part, path(rank_));
    std::vector<std::string> blobs;
    for (int64_t rank = 0; rank < world_; ++rank) {
      while (!std::filesystem::exists(path(rank))) {
        if (Clock::Real().Now() > deadline) return Error(Reason::kStepTimeout).Text("no peer");
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
      std::ifstream file(path(rank), std::ios::binary);
      blobs.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    return blobs;
  }

 private:
  const std::filesystem::path folder_;
  const int64_t rank_;
  const int64_t world_;
};

}  // namespace expertd::conformance

#endif  // TESTS_KERNELS_CUDA_FILE_EXCHANGE_H_
