// NCCL's order of preference: peer memory, shared memory, network; see transport.h.
#include "kernels/transport.h"

#include <algorithm>

#include "base/strings.h"

namespace expertd {
namespace {

// Why peer memory cannot be used, or what it is.
Transport PeerMemory(const TransportFacts& self, const TransportFacts& peer,
                     const std::vector<DevicePeer>& peers) {
  if (self.nccl.p2p_disabled || peer.nccl.p2p_disabled) {
    return {"", "NCCL_P2P_DISABLE or NCCL_P2P_LEVEL forbids peer access"};
  }
  const auto seen = std::find_if(peers.begin(), peers.end(), [&](const DevicePeer& other) {
    return other.uuid == peer.device_uuid;
  });
  if (seen == peers.end()) {
    return {"unknown", StrCat("GPU ", peer.pci_bus_id, " is hidden from this daemon: let it see ",
                              "all GPUs of the host to know")};
  }
  if (!seen->access) return {"", "the driver allows no peer access between the two GPUs"};
  if (seen->nvlink) return {"nvlink p2p", ""};
  if (self.nccl.p2p_nvlink_only || peer.nccl.p2p_nvlink_only) {
    return {"", "NCCL_P2P_LEVEL allows peer access over NVLink only"};
  }
  // Behind two CPU sockets NCCL prefers shared memory, which the driver does not tell us.
  return {"p2p pcie", "no NVLink between the two GPUs"};
}

}  // namespace

std::string NcclHostKey(const NcclSettings& settings, std::string_view host,
                        std::string_view boot_id) {
  return settings.host_id.empty() ? StrCat(host, " ", boot_id) : settings.host_id;
}

Transport TransportBetween(std::string_view backend, const TransportFacts& self,
                           const TransportFacts& peer, const std::vector<DevicePeer>& peers) {
  if (backend == "loopback") return {"loopback", "ranks of one process"};
  if (backend == "gloo") return {"gloo tcp", ""};
  if (self.host_key != peer.host_key) {
    return {"network", StrCat("another host to NCCL: \"", self.host_key, "\" here, \"",
                              peer.host_key, "\" there")};
  }
  Transport direct = PeerMemory(self, peer, peers);
  if (!direct.name.empty()) return direct;
  if (!self.nccl.shm_disabled && !peer.nccl.shm_disabled) return {"shm", direct.reason};
  return {"network", StrCat(direct.reason, "; NCCL_SHM_DISABLE forbids shared memory")};
}

}  // namespace expertd
