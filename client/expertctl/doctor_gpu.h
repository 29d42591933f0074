// doctor's checks of daemons on GPUs: versions, peer access, shared memory, ways between ranks.
#ifndef CLIENT_EXPERTCTL_DOCTOR_GPU_H_
#define CLIENT_EXPERTCTL_DOCTOR_GPU_H_

#include <vector>

#include "client/cpp/group_controller.h"
#include "client/expertctl/doctor.h"

namespace expertd::expertctl {

// One daemon; nothing for one on the CPU.
void CheckGpu(const client::HostReport& host, std::vector<Finding>* findings);

// What daemons on GPUs must have in common. REQUIRES: all answered.
void CheckGpusTogether(const std::vector<const client::HostReport*>& hosts,
                       std::vector<Finding>* findings);

// The ways between the ranks of a formed group, as its ranks tell them.
void CheckTransports(const std::vector<const client::HostReport*>& hosts,
                     std::vector<Finding>* findings);

}  // namespace expertd::expertctl

#endif  // CLIENT_EXPERTCTL_DOCTOR_GPU_H_
