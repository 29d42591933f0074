// What daemons say about their GPUs, judged; see doctor_gpu.h.
#include "client/expertctl/doctor_gpu.h"

#include <functional>
#include <map>
#include <string>

#include "base/strings.h"
#include "client/cpp/placement.h"

namespace expertd::expertctl {
namespace {

// Without peer access NCCL moves rows through /dev/shm: for each pair of ranks, direction and
// channel (64 here) about 4 MiB, so half a gibibyte for one peer. Container runtimes give 64 MiB
// unless told otherwise, and NCCL then fails while the group forms.
constexpr int64_t kNeedSharedMemory = int64_t{1} << 30;

bool OnGpu(const client::HostReport& host) { return host.info.device().kind() == "cuda"; }

void CheckVersions(const client::HostReport& host, std::vector<Finding>* findings) {
  const v1::DeviceInfo& device = host.info.device();
  const auto driver = client::ParseVersion(device.cuda_driver());
  const auto runtime = client::ParseVersion(device.cuda_runtime());
  if (!driver.ok() || !runtime.ok()) return;  // an older daemon does not say
  const std::string text =
      StrCat(device.name(), ", compute capability ", device.compute_capability(), ", ",
             device.multiprocessors(), " SMs; driver ",
             device.driver_version().empty() ? "of unknown version" : device.driver_version(),
             " for CUDA up to ", device.cuda_driver(), ", runtime ", device.cuda_runtime(),
             ", NCCL ", device.nccl_version());
  if (driver->major < runtime->major) {
    findings->push_back({Severity::kProblem, host.host,
                         StrCat(text, ": the driver is older than the runtime"),
                         StrCat("install a driver for CUDA ", device.cuda_runtime())});
  } else if (driver->major == runtime->major && driver->minor < runtime->minor) {
    findings->push_back({Severity::kWarning, host.host,
                         StrCat(text, ": the driver is a minor version behind the runtime"),
                         StrCat("a driver for CUDA ", device.cuda_runtime(),
                                " serves everything the runtime may ask")});
  } else {
    findings->push_back({Severity::kGood, host.host, text, ""});
  }
}

void CheckPeers(const client::HostReport& host, std::vector<Finding>* findings) {
  const v1::DeviceInfo& device = host.info.device();
  for (const v1::DevicePeer& peer : device.peers()) {
    const std::string pair = StrCat("GPU ", device.ordinal(), " (", device.pci_bus_id(),
                                    ") to GPU ", peer.ordinal(), " (", peer.pci_bus_id(), "): ");
    if (peer.access()) {
      findings->push_back({Severity::kGood, host.host,
                           StrCat(pair, "peer access over ", peer.nvlink() ? "NVLink" : "PCIe"),
                           ""});
      continue;
    }
    findings->push_back({Severity::kWarning, host.host, StrCat(pair, "no peer access"),
                         "turn off the IOMMU or PCIe access control, or leave MIG mode; without "
                         "peer access rows go through host memory"});
  }
}

void CheckSharedMemory(const client::HostReport& host, std::vector<Finding>* findings) {
  const int64_t bytes = host.info.shared_memory_bytes();
  if (bytes == 0) return;  // an older daemon does not say
  if (bytes >= kNeedSharedMemory) {
    findings->push_back({Severity::kGood, host.host, StrCat("/dev/shm has ", bytes, " bytes"), ""});
    return;
  }
  findings->push_back({Severity::kWarning, host.host,
                       StrCat("/dev/shm: got ", bytes < 0 ? "none" : StrCat(bytes, " bytes"),
                              ", need ", kNeedSharedMemory, " where two GPUs have no peer access"),
                       "start the container with a larger shared memory (--shm-size=1g)"});
}

// One value of all hosts, or a finding that names two that differ.
void CheckSame(const std::vector<const client::HostReport*>& hosts, const std::string& what,
               const std::function<std::string(const v1::DeviceInfo&)>& value, Severity severity,
               const std::string& remedy, std::vector<Finding>* findings) {
  const client::HostReport* first = nullptr;
  for (const client::HostReport* host : hosts) {
    const std::string mine = value(host->info.device());
    if (!OnGpu(*host) || mine.empty()) continue;
    if (first == nullptr) {
      first = host;
    } else if (mine != value(first->info.device())) {
      findings->push_back({severity, "group",
                           StrCat(what, ": got ", value(first->info.device()), " at ", first->host,
                                  " and ", mine, " at ", host->host, ", need one for all"),
                           remedy});
      return;
    }
  }
}

}  // namespace

void CheckGpu(const client::HostReport& host, std::vector<Finding>* findings) {
  if (!OnGpu(host)) return;
  CheckVersions(host, findings);
  CheckPeers(host, findings);
  CheckSharedMemory(host, findings);
}

void CheckGpusTogether(const std::vector<const client::HostReport*>& hosts,
                       std::vector<Finding>* findings) {
  CheckSame(
      hosts, "NCCL", [](const v1::DeviceInfo& device) { return device.nccl_version(); },
      Severity::kProblem, "give every daemon the same libnccl", findings);
  CheckSame(
      hosts, "GPU model", [](const v1::DeviceInfo& device) { return device.name(); },
      Severity::kWarning, "the slowest GPU sets the pace: use equal ones in one group", findings);
  CheckSame(
      hosts, "driver", [](const v1::DeviceInfo& device) { return device.driver_version(); },
      Severity::kWarning, "install the same driver on every machine", findings);
}

void CheckTransports(const std::vector<const client::HostReport*>& hosts,
                     std::vector<Finding>* findings) {
  std::map<int64_t, std::string> boots;  // by rank
  for (const client::HostReport* host : hosts) boots[host->group.rank()] = host->info.boot_id();
  for (const client::HostReport* host : hosts) {
    for (const v1::PeerTransport& way : host->group.transports()) {
      if (way.rank() == host->group.rank()) continue;
      const std::string text =
          StrCat("rank ", host->group.rank(), " reaches rank ", way.rank(), ": ", way.transport(),
                 way.reason().empty() ? "" : StrCat(" (", way.reason(), ")"));
      const auto boot = boots.find(way.rank());
      const bool one_machine = boot != boots.end() && boot->second == host->info.boot_id();
      const bool slow =
          OnGpu(*host) && one_machine && (way.transport() == "network" || way.transport() == "shm");
      if (slow) {
        findings->push_back({Severity::kWarning, host->host, StrCat(text, ", on one machine"),
                             "let NCCL use peer access: see the reason, and NCCL_P2P_DISABLE, "
                             "NCCL_SHM_DISABLE and the containers' host names"});
      } else {
        findings->push_back({Severity::kGood, host->host, text, ""});
      }
    }
  }
}

}  // namespace expertd::expertctl
