// Methods of the public API that this daemon does not serve yet: one list, one answer.
#ifndef SERVER_RPC_UNSUPPORTED_H_
#define SERVER_RPC_UNSUPPORTED_H_

#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "kernels/backends.h"
#include "server/rpc/status.h"

namespace expertd::rpc {

// What GetServerInfo.methods shows: "Service.Method", and "dp_size > 1".
const std::vector<Support>& UnsupportedMethods();

// NOT_IMPLEMENTED with the reason of that list.
absl::Status Unsupported(std::string_view method);

// A streaming call that ends at once with NOT_IMPLEMENTED. Deletes itself.
template <typename Reactor>
class UnsupportedStream final : public Reactor {
 public:
  explicit UnsupportedStream(std::string_view method) { this->Finish(ToGrpc(Unsupported(method))); }
  void OnDone() override { delete this; }
};

}  // namespace expertd::rpc

#endif  // SERVER_RPC_UNSUPPORTED_H_
