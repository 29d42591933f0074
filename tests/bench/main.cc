// expertd_bench: times the expert-parallel operations and the layer on this machine's devices.
//
// One thread per rank in one process. Every workload is checked on the buffers that are timed
// before it is timed; a wrong one is reported with "correct": false and no time. Times are wall
// time per operation including the wait for the device, the slowest rank of each iteration.
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_split.h"
#include "base/ids.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "kernels/backends.h"
#include "kernels/cpu/cpu_device.h"
#include "server/version.h"
#include "tests/bench/bench_rank.h"
#include "tests/bench/row.h"
#include "tests/testing/gather_board.h"

ABSL_FLAG(std::string, device, "cpu", "cpu, or cuda: rank r uses cuda:r");
ABSL_FLAG(int, world, 2, "ranks");
ABSL_FLAG(std::string, backend, "", "EP backend; empty: loopback on cpu, nccl on cuda");
ABSL_FLAG(std::string, mlp, "", "expert implementation; empty: the fastest");
ABSL_FLAG(std::string, dtype, "bf16", "bf16, f16 or f32");
ABSL_FLAG(int, alignment, 0, "rows per expert segment; 0: 1 on cpu, 128 on cuda");
ABSL_FLAG(std::string, workloads, "", "comma-separated names; empty: those of the device");
ABSL_FLAG(int, iterations, 30, "timed repetitions");
ABSL_FLAG(int, warmup, 5, "repetitions before them");
ABSL_FLAG(bool, backward, true, "time forward_backward too");
ABSL_FLAG(int, burst, 0,
          "also time this many operations queued one behind the other, the host's wait shared by "
          "them: rows *_burst, time of one; 0: none");
ABSL_FLAG(bool, layers, true, "time what needs experts too: experts, forward, forward_backward");
ABSL_FLAG(bool, json, false, "rows as JSON; otherwise a table");
ABSL_FLAG(int, cpu_threads, 1, "threads of one rank's matrix products on the CPU");
ABSL_FLAG(double, wire_gbps, 0, "ceiling of one link, one way; 0: measured by memcpy on cpu");
ABSL_FLAG(double, memory_gbps, 0, "ceiling of memory, read plus written; 0: as wire_gbps");
ABSL_FLAG(double, tflops, 0, "ceiling of a dense matrix product; 0: unknown");
ABSL_FLAG(double, latency_us, 0, "floor of a small message between two ranks; 0: unknown");
ABSL_FLAG(int, comm_sms, 0, "SMs that communication may use; 0: automatic");
ABSL_FLAG(std::string, commit, "", "recorded in every row; empty: what this was built from");
ABSL_FLAG(std::string, routing_dir, "", "folder that gets the routing, for others to repeat");

namespace expertd::bench {
namespace {

using RankFunction = std::function<absl::Status(size_t rank)>;

// Runs `work` on all ranks at once; the first error of any rank.
absl::Status OnAllRanks(size_t world, const RankFunction& work) {
  std::vector<absl::Status> status(world);
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] { status[rank] = work(rank); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& one : status) RETURN_IF_ERROR(one);
  return absl::OkStatus();
}

// Microseconds of the slowest rank in each timed iteration.
absl::StatusOr<std::vector<double>> Time(size_t world, const RankFunction& work) {
  const int warmup = absl::GetFlag(FLAGS_warmup);
  const int total = warmup + absl::GetFlag(FLAGS_iterations);
  std::vector<std::vector<double>> times(world);
  std::barrier start(static_cast<std::ptrdiff_t>(world));
  RETURN_IF_ERROR(OnAllRanks(world, [&](size_t rank) -> absl::Status {
    absl::Status status;
    for (int i = 0; i < total; ++i) {
      start.arrive_and_wait();
      const SteadyTime begin = Clock::Real().Now();
      // After an error the rank keeps meeting the others, whose operations time out by themselves.
      if (status.ok()) status = work(rank);
      if (i >= warmup) times[rank].push_back(ToMicros(Clock::Real().Now() - begin));
    }
    return status;
  }));
  std::vector<double> slowest(times[0].size());
  for (const std::vector<double>& one : times) {
    for (size_t i = 0; i < one.size(); ++i) slowest[i] = std::max(slowest[i], one[i]);
  }
  return slowest;
}

// GB/s of bytes read plus written by memcpy over memory far larger than the caches.
double MeasureMemcpy() {
  constexpr size_t kBytes = 256 << 20;
  std::vector<char> from(kBytes, 1);
  std::vector<char> to(kBytes, 2);
  double best = 0;
  for (int i = 0; i < 5; ++i) {
    const SteadyTime begin = Clock::Real().Now();
    std::memcpy(to.data(), from.data(), kBytes);
    best = std::max(best, 2.0 * kBytes / ToSeconds(Clock::Real().Now() - begin) / 1e9);
  }
  return best;
}

absl::StatusOr<DType> ParseDType(const std::string& name) {
  if (name == "bf16") return DType::kBF16;
  if (name == "f16") return DType::kF16;
  if (name == "f32") return DType::kF32;
  return Error(Reason::kConfigInvalid).Text("--dtype: got ", name, ", need bf16, f16 or f32");
}

absl::StatusOr<std::vector<Workload>> ChosenWorkloads(bool gpu) {
  const std::string names = absl::GetFlag(FLAGS_workloads);
  std::vector<Workload> chosen;
  for (const Workload& workload : AllWorkloads()) {
    const bool for_cpu = workload.name.rfind("cpu_", 0) == 0;
    bool wanted = names.empty() && for_cpu != gpu;
    for (absl::string_view name : absl::StrSplit(names, ',')) wanted |= name == workload.name;
    if (wanted) chosen.push_back(workload);
  }
  if (chosen.empty()) return Error(Reason::kConfigInvalid).Text("--workloads: no such: ", names);
  return chosen;
}

// One file per rank with ids [T, K] i64 and then weights [T, K] f32, when a folder is named.
absl::Status WriteRouting(const Workload& workload, const std::vector<Routing>& by_rank) {
  const std::string folder = absl::GetFlag(FLAGS_routing_dir);
  if (folder.empty()) return absl::OkStatus();
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const std::string path = StrCat(folder, "/", workload.name, ".", rank);
    std::ofstream file(path, std::ios::binary);
    const auto write = [&file](const auto& values) {
      file.write(reinterpret_cast<const char*>(values.data()),
                 static_cast<std::streamsize>(values.size() * sizeof(values[0])));
    };
    write(by_rank[rank].ids);
    write(by_rank[rank].weights);
    file.close();
    if (!file) return Error(Reason::kConfigInvalid).Text("--routing_dir: cannot write ", path);
  }
  return absl::OkStatus();
}

class Benchmark {
 public:
  Benchmark(RankOptions options, Ceilings ceilings)
      : options_(std::move(options)),
        ceilings_(ceilings),
        world_(static_cast<size_t>(options_.world)) {}

  absl::Status Run(const Workload& workload) {
    std::vector<Routing> routing;
    for (int64_t rank = 0; rank < options_.world; ++rank) {
      routing.push_back(MakeRouting(workload, options_.world, rank, options_.seed));
    }
    RETURN_IF_ERROR(WriteRouting(workload, routing));
    std::vector<std::unique_ptr<BenchRank>> ranks(world_);
    RETURN_IF_ERROR(Form(workload, routing, ranks));
    RETURN_IF_ERROR(OnAllRanks(world_, [&](size_t rank) { return ranks[rank]->Forward(); }));
    bool correct = true;
    for (size_t rank = 0; rank < world_ && correct; ++rank) {
      ASSIGN_OR_RETURN(const bool dispatch, ranks[rank]->CheckDispatch(routing));
      ASSIGN_OR_RETURN(const bool experts, ranks[rank]->CheckExperts());
      ASSIGN_OR_RETURN(const bool combine, ranks[rank]->CheckCombine(routing, ranks));
      correct = dispatch && experts && combine;
      if (correct) continue;
      std::cerr << workload.name << ": wrong on rank " << rank << (dispatch ? "" : " dispatch")
                << (experts ? "" : " experts") << (combine ? "" : " combine") << "\n";
    }
    Row row;
    row.workload = workload;
    row.backend = options_.backend;
    row.mlp = std::string(ranks[0]->mlp());
    row.world = options_.world;
    row.dtype = options_.dtype;
    row.device = ranks[0]->device().facts();
    row.commit = absl::GetFlag(FLAGS_commit);
    if (row.commit.empty())
      row.commit = std::string(server::Build().substr(0, server::Build().find(',')));
    row.sms = options_.comm_sms > 0 ? options_.comm_sms : row.device.multiprocessors;
    row.correct = correct;
    const Traffic traffic = CountTraffic(workload, routing);
    const std::vector<std::pair<std::string, absl::Status (BenchRank::*)()>> operations = {
        {"prepare", &BenchRank::Prepare},
        {"dispatch", &BenchRank::Dispatch},
        {"experts", &BenchRank::Experts},
        {"combine", &BenchRank::Combine},
        {"forward", &BenchRank::Forward}};
    const bool layers = absl::GetFlag(FLAGS_layers);
    for (const auto& [op, method] : operations) {
      if (!layers && (op == "experts" || op == "forward")) continue;
      RETURN_IF_ERROR(Measure(row, op, traffic,
                              [&, m = method](size_t rank) { return (ranks[rank].get()->*m)(); }));
    }
    RETURN_IF_ERROR(MeasureBursts(row, traffic, ranks));
    if (!absl::GetFlag(FLAGS_backward) || !layers) return absl::OkStatus();
    return Measure(row, "forward_backward", traffic, [&](size_t rank) -> absl::Status {
      RETURN_IF_ERROR(ranks[rank]->Forward());
      return ranks[rank]->Backward();
    });
  }

 private:
  absl::Status MeasureBursts(const Row& row, const Traffic& traffic,
                             const std::vector<std::unique_ptr<BenchRank>>& ranks) {
    const int count = absl::GetFlag(FLAGS_burst);
    if (count == 0) return absl::OkStatus();
    const std::vector<std::pair<std::string, absl::Status (BenchRank::*)(int)>> bursts = {
        {"prepare", &BenchRank::PrepareBurst},
        {"dispatch", &BenchRank::DispatchBurst},
        {"combine", &BenchRank::CombineBurst},
        {"round_trip", &BenchRank::RoundTripBurst}};
    for (const auto& [op, method] : bursts) {
      RETURN_IF_ERROR(Measure(
          row, op, traffic, [&, m = method](size_t rank) { return (ranks[rank].get()->*m)(count); },
          count));
    }
    return absl::OkStatus();
  }

  absl::Status Form(const Workload& workload, const std::vector<Routing>& routing,
                    std::vector<std::unique_ptr<BenchRank>>& ranks) {
    testing::GatherBoard board(world_);
    const uint64_t epoch = RandomId();
    return OnAllRanks(world_, [&](size_t rank) -> absl::Status {
      testing::BoardExchange exchange(board, rank);
      RankOptions options = options_;
      options.rank = static_cast<int64_t>(rank);
      if (options.device == "cuda") options.device = StrCat("cuda:", rank);
      EpBootstrap bootstrap;
      bootstrap.group_id = "bench";
      bootstrap.epoch = epoch;
      bootstrap.bootstrap_id = "bench";
      bootstrap.listen_host = "127.0.0.1";
      bootstrap.exchange = &exchange;
      bootstrap.deadline = Clock::Real().Now() + std::chrono::seconds(120);
      ASSIGN_OR_RETURN(ranks[rank], BenchRank::Create(options, workload, routing[rank], bootstrap));
      return absl::OkStatus();
    });
  }

  absl::Status Measure(Row row, const std::string& op, const Traffic& traffic,
                       const RankFunction& work, int burst = 0) {
    row.op = burst == 0 ? op : StrCat(op, "_burst");
    row.work = WorkOf(op, row.workload, traffic, row.dtype);
    if (row.correct) {
      ASSIGN_OR_RETURN(row.samples_us, Time(world_, work));
      for (double& sample : row.samples_us) sample /= std::max(burst, 1);
    }
    Print(row);
    return absl::OkStatus();
  }

  void Print(const Row& row) const {
    if (absl::GetFlag(FLAGS_json)) {
      std::puts(ToJson(row, ceilings_).c_str());
    } else {
      std::vector<double> sorted = row.samples_us;
      std::sort(sorted.begin(), sorted.end());
      const double floor = FloorMicros(row.work, ceilings_);
      std::printf("%-18s %-17s %12.1f us  floor %10.1f us  %s\n", row.workload.name.c_str(),
                  row.op.c_str(), sorted.empty() ? 0 : sorted[sorted.size() / 2], floor,
                  row.correct ? "" : "WRONG");
    }
    std::fflush(stdout);
  }

  const RankOptions options_;
  const Ceilings ceilings_;
  const size_t world_;
};

absl::Status RunAll() {
  RankOptions options;
  options.device = absl::GetFlag(FLAGS_device);
  const bool gpu = options.device != "cpu";
  options.backend = absl::GetFlag(FLAGS_backend);
  if (options.backend.empty()) options.backend = gpu ? "nccl" : "loopback";
  options.mlp = absl::GetFlag(FLAGS_mlp);
  options.world = absl::GetFlag(FLAGS_world);
  options.comm_sms = absl::GetFlag(FLAGS_comm_sms);
  options.alignment = absl::GetFlag(FLAGS_alignment);
  if (options.alignment == 0) options.alignment = gpu ? 128 : 1;
  ASSIGN_OR_RETURN(options.dtype, ParseDType(absl::GetFlag(FLAGS_dtype)));
  ASSIGN_OR_RETURN(const std::vector<Workload> workloads, ChosenWorkloads(gpu));
  SetCpuThreads(absl::GetFlag(FLAGS_cpu_threads));
  Ceilings ceilings = {absl::GetFlag(FLAGS_wire_gbps), absl::GetFlag(FLAGS_memory_gbps),
                       absl::GetFlag(FLAGS_tflops), absl::GetFlag(FLAGS_latency_us)};
  if (ceilings.wire_gbps == 0 && !gpu) ceilings.wire_gbps = MeasureMemcpy();
  if (ceilings.memory_gbps == 0) ceilings.memory_gbps = ceilings.wire_gbps;
  Benchmark benchmark(options, ceilings);
  for (const Workload& workload : workloads) RETURN_IF_ERROR(benchmark.Run(workload));
  return absl::OkStatus();
}

}  // namespace
}  // namespace expertd::bench

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("times the expert-parallel operations on this machine's devices");
  absl::ParseCommandLine(argc, argv);
  const absl::Status status = expertd::bench::RunAll();
  if (status.ok()) return 0;
  std::cerr << "expertd_bench: " << status.message() << "\n";
  return 1;
}
