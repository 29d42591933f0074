// Queries of the CUDA runtime, NCCL, /proc and NCCL's variables; see device_facts.h.
#include "kernels/cuda/device_facts.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>

#include "base/status_macros.h"
#include "base/strings.h"
#include "kernels/cuda/status.h"

namespace expertd {
namespace {

std::string FormatUuid(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x",
                  static_cast<unsigned>(static_cast<unsigned char>(uuid.bytes[i])));
    text += digits;
  }
  return text;
}

// 13000 is 13.0, 12080 is 12.8.
std::string CudaVersion(int number) { return StrCat(number / 1000, ".", number % 1000 / 10); }

// 22809 is 2.28.9.
std::string NcclVersion(int number) {
  return StrCat(number / 10000, ".", number / 100 % 100, ".", number % 100);
}

// Containers may hide it: then "", and cuda_driver says what matters.
std::string DriverVersion() {
  std::ifstream file("/sys/module/nvidia/version");
  std::string version;
  if (std::getline(file, version)) return version;
  // "NVRM version: NVIDIA UNIX ... Kernel Module  580.159.04  Release Build ...": the first word
  // that begins with a digit and has a dot.
  std::ifstream text("/proc/driver/nvidia/version");
  while (text >> version) {
    if (version[0] >= '0' && version[0] <= '9' && version.find('.') != std::string::npos) {
      return version;
    }
  }
  return "";
}

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// NCCL reads them as numbers: everything but 0 is on.
bool IsOn(const char* name) { return std::strtol(Variable(name).c_str(), nullptr, 0) != 0; }

NcclSettings ReadNcclSettings() {
  const std::string level = Variable("NCCL_P2P_LEVEL");
  NcclSettings settings;
  settings.host_id = Variable("NCCL_HOSTID");
  settings.p2p_disabled = IsOn("NCCL_P2P_DISABLE") || level == "LOC" || level == "0";
  settings.p2p_nvlink_only = level == "NVL" || level == "1";
  settings.shm_disabled = IsOn("NCCL_SHM_DISABLE");
  return settings;
}

// Name, UUID and place on the bus.
template <typename Target>
absl::Status Identify(int ordinal, const cudaDeviceProp& properties, Target& target) {
  char pci[32] = {};
  RETURN_IF_ERROR(
      CudaStatus(cudaDeviceGetPCIBusId(pci, sizeof(pci), ordinal), "reading the PCI bus id"));
  target.ordinal = ordinal;
  target.name = properties.name;
  target.uuid = FormatUuid(properties.uuid);
  target.pci_bus_id = pci;
  return absl::OkStatus();
}

absl::StatusOr<DevicePeer> ReadPeer(int ordinal, int other) {
  cudaDeviceProp properties;
  RETURN_IF_ERROR(
      CudaStatus(cudaGetDeviceProperties(&properties, other), "reading device properties"));
  DevicePeer peer;
  RETURN_IF_ERROR(Identify(other, properties, peer));
  int access = 0;
  RETURN_IF_ERROR(
      CudaStatus(cudaDeviceCanAccessPeer(&access, ordinal, other), "asking for peer access"));
  peer.access = access != 0;
  if (!peer.access) return peer;
  // Atomics between GPUs go through NVLink natively and through PCIe not at all.
  int atomics = 0;
  RETURN_IF_ERROR(CudaStatus(
      cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, ordinal, other),
      "asking how a peer is reached"));
  peer.nvlink = atomics != 0;
  return peer;
}

absl::Status ReadVersions(DeviceFacts& facts) {
  int driver = 0;
  int runtime = 0;
  int nccl = 0;
  RETURN_IF_ERROR(CudaStatus(cudaDriverGetVersion(&driver), "reading the driver's version"));
  RETURN_IF_ERROR(CudaStatus(cudaRuntimeGetVersion(&runtime), "reading the runtime's version"));
  RETURN_IF_ERROR(NcclStatus(ncclGetVersion(&nccl), "reading NCCL's version", nullptr));
  facts.driver_version = DriverVersion();
  facts.cuda_driver = CudaVersion(driver);
  facts.cuda_runtime = CudaVersion(runtime);
  facts.nccl_version = NcclVersion(nccl);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<DeviceFacts> ReadDeviceFacts(int ordinal) {
  cudaDeviceProp properties;
  RETURN_IF_ERROR(
      CudaStatus(cudaGetDeviceProperties(&properties, ordinal), "reading device properties"));
  DeviceFacts facts;
  RETURN_IF_ERROR(Identify(ordinal, properties, facts));
  facts.kind = "cuda";
  facts.compute_capability = StrCat(properties.major, ".", properties.minor);
  facts.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  facts.multiprocessors = properties.multiProcessorCount;
  RETURN_IF_ERROR(ReadVersions(facts));
  facts.nccl = ReadNcclSettings();
  int count = 0;
  RETURN_IF_ERROR(CudaStatus(cudaGetDeviceCount(&count), "counting devices"));
  for (int other = 0; other < count; ++other) {
    if (other == ordinal) continue;
    ASSIGN_OR_RETURN(DevicePeer peer, ReadPeer(ordinal, other));
    facts.peers.push_back(std::move(peer));
  }
  return facts;
}

}  // namespace expertd
