// The probe paths on libmicrohttpd.
#include "server/observe/probe_server.h"

#include <microhttpd.h>
#include <unistd.h>

#include <utility>

#include "base/error.h"
#include "base/status_macros.h"

namespace expertd::observe {
namespace {

constexpr unsigned int kMaxConnections = 64;
constexpr unsigned int kTimeoutSeconds = 10;
constexpr char kMetricsType[] = "text/plain; version=0.0.4; charset=utf-8";
constexpr char kTextType[] = "text/plain; charset=utf-8";

ProbeAnswer YesOrNo(bool yes, const char* otherwise) {
  return yes ? ProbeAnswer{MHD_HTTP_OK, kTextType, "ok\n"}
             : ProbeAnswer{MHD_HTTP_SERVICE_UNAVAILABLE, kTextType, otherwise};
}

// libmicrohttpd's request handler; `context` is the server's ProbeSource.
MHD_Result Handle(void* context, MHD_Connection* connection, const char* url, const char* method,
                  const char*, const char*, size_t* upload_size, void**) {
  if (*upload_size != 0) {  // a body: no path takes one
    *upload_size = 0;
    return MHD_YES;
  }
  const ProbeAnswer answer = AnswerProbe(method, url, *static_cast<ProbeSource*>(context));
  MHD_Response* response = MHD_create_response_from_buffer(
      answer.body.size(), const_cast<char*>(answer.body.data()), MHD_RESPMEM_MUST_COPY);
  if (response == nullptr) return MHD_NO;
  MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, answer.content_type.c_str());
  if (answer.status == MHD_HTTP_METHOD_NOT_ALLOWED) {
    MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
  }
  const MHD_Result result =
      MHD_queue_response(connection, static_cast<unsigned int>(answer.status), response);
  MHD_destroy_response(response);
  return result;
}

}  // namespace

ProbeAnswer AnswerProbe(const std::string& method, const std::string& path,
                        const ProbeSource& source) {
  if (method != "GET" && method != "HEAD") {
    return {MHD_HTTP_METHOD_NOT_ALLOWED, kTextType, "need GET or HEAD\n"};
  }
  if (path == "/metrics") return {MHD_HTTP_OK, kMetricsType, source.metrics()};
  if (path == "/healthz") return YesOrNo(true, "");
  if (path == "/readyz") return YesOrNo(source.ready(), "draining\n");
  if (path == "/groupz") return YesOrNo(source.group_ready(), "no group is ready\n");
  return {MHD_HTTP_NOT_FOUND, kTextType, "need /metrics, /healthz, /readyz or /groupz\n"};
}

absl::StatusOr<std::unique_ptr<ProbeServer>> ProbeServer::Create(const HostPort& address,
                                                                 ProbeSource source) {
  ASSIGN_OR_RETURN(const int socket, Listen(address));
  std::unique_ptr<ProbeServer> server(
      new ProbeServer(JoinHostPort(address.host, BoundPort(socket)), std::move(source)));
  server->daemon_ =
      MHD_start_daemon(MHD_USE_AUTO | MHD_USE_INTERNAL_POLLING_THREAD, 0, nullptr, nullptr, &Handle,
                       const_cast<ProbeSource*>(&server->source_), MHD_OPTION_LISTEN_SOCKET, socket,
                       MHD_OPTION_CONNECTION_LIMIT, kMaxConnections, MHD_OPTION_CONNECTION_TIMEOUT,
                       kTimeoutSeconds, MHD_OPTION_END);
  if (server->daemon_ == nullptr) {
    close(socket);
    return Error(Reason::kInternal).Text("cannot start the probe server on ", server->address_);
  }
  return server;
}

ProbeServer::ProbeServer(std::string address, ProbeSource source)
    : address_(std::move(address)), source_(std::move(source)) {}

ProbeServer::~ProbeServer() {
  if (daemon_ != nullptr) MHD_stop_daemon(daemon_);  // closes the socket, too
}

}  // namespace expertd::observe
