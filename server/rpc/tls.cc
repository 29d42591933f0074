// gRPC's file watching certificate provider, configured for each direction.
#include "server/rpc/tls.h"

#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_credentials_options.h"

namespace expertd::rpc {
namespace {

using grpc::experimental::FileWatcherCertificateProvider;

constexpr unsigned int kRefreshSeconds = 2;

}  // namespace

std::shared_ptr<grpc::ServerCredentials> MakeServerCredentials(const TlsFiles& files) {
  if (!files.enabled()) return grpc::InsecureServerCredentials();
  auto provider = std::make_shared<FileWatcherCertificateProvider>(
      files.key, files.cert, files.client_ca, kRefreshSeconds);
  grpc::experimental::TlsServerCredentialsOptions options(provider);
  options.watch_identity_key_cert_pairs();
  if (files.client_ca.empty()) {
    options.set_cert_request_type(GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
  } else {
    options.watch_root_certs();
    options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  return grpc::experimental::TlsServerCredentials(options);
}

std::shared_ptr<grpc::ChannelCredentials> MakeChannelCredentials(const TlsFiles& files) {
  if (!files.enabled()) return grpc::InsecureChannelCredentials();
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(std::make_shared<FileWatcherCertificateProvider>(
      files.key, files.cert, files.client_ca.empty() ? files.cert : files.client_ca,
      kRefreshSeconds));
  options.watch_identity_key_cert_pairs();
  options.watch_root_certs();
  return grpc::experimental::TlsCredentials(options);
}

}  // namespace expertd::rpc
