// Tests of TLS between callers and daemons: who may connect, and rotation without a restart.
//
// The keys below were made for this test and guard nothing.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <chrono>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "expertd/v1/control_service.grpc.pb.h"
#include "grpcpp/create_channel.h"
#include "server/daemon.h"
#include "server/rpc/status.h"

namespace expertd::server {
namespace {

using std::chrono::seconds;

constexpr char kCaA[] = R"(-----BEGIN CERTIFICATE-----
MIIBfTCCASWgAwIBAgIURwn8Z8qytYNVnPElLFv5XtF50QIwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJdGVzdC1jYS1hMCAXDTI2MTEzMDIxNDUyMloYDzIxMjYxMTA2
MjE0NTIyWjAUMRIwEAYDVQQDDAl0ZXN0LWNhLWEwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAATjhkY1vcUfFthgs3fnHeE14GkVSiigtnWbvf1VLHjV0btRyKfDJdnj
5iaQy8RnvMdAimH6BXtemY/I2/VSfl9Zo1MwUTAdBgNVHQ4EFgQUCbtoYuUbCIq2
Uz5Ug5zl4v1YblcwHwYDVR0jBBgwFoAUCbtoYuUbCIq2Uz5Ug5zl4v1YblcwDwYD
VR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNGADBDAiAyMN7eRXLImVI9OHIQAw4q
FpwUEcnvsKqCCAnvJ7QBFAIfbYolwauNNZfY9hsxGKrbzJy9bg+QzEiUzw5xh+tj
mQ==
-----END CERTIFICATE-----
)";
constexpr char kCertA[] = R"(-----BEGIN CERTIFICATE-----
MIIBiDCCAS6gAwIBAgIUf9g832B+hqrxXP94ezTjTKFv9tUwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJdGVzdC1jYS1hMCAXDTI2MTEzMDIxNDYwOFoYDzIxMjYxMTA2
MjE0NjA4WjASMRAwDgYDVQQDDAdleHBlcnRkMFkwEwYHKoZIzj0CAQYIKoZIzj0D
AQcDQgAEGNl7OFh22vpVf9c5cn0il10hVHzttYfoOZ+FjnH8CI0xyCs2C9B6/iP+
1q04t1+q/U6XEkkOQMFpQjNtQafHh6NeMFwwGgYDVR0RBBMwEYcEfwAAAYIJbG9j
YWxob3N0MB0GA1UdDgQWBBQ53x5JBw26t8F5zisGqnpZtfsLlzAfBgNVHSMEGDAW
gBQJu2hi5RsIirZTPlSDnOXi/VhuVzAKBggqhkjOPQQDAgNIADBFAiEAhC7/yvmp
+35WXltvPvzw6hKQnjUnwz/9mXrfpSc18EMCIFkPg7ofj1W4M4fbbc340+rRdv0P
//vEThNcyccz+gW9
-----END CERTIFICATE-----
)";
constexpr char kKeyA[] = R"(-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgY70FxHJ/+8qVJdeT
HJ84/oGuIshLSMq/R5IaAYLZcPOhRANCAAQY2Xs4WHba+lV/1zlyfSKXXSFUfO21
h+g5n4WOcfwIjTHIKzYL0Hr+I/7WrTi3X6r9TpcSSQ5AwWlCM21Bp8eH
-----END PRIVATE KEY-----
)";
constexpr char kCaB[] = R"(-----BEGIN CERTIFICATE-----
MIIBfjCCASWgAwIBAgIUU93Yet472D0pLBlGDCHochGYaM4wCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJdGVzdC1jYS1iMCAXDTI2MTEzMDIxNDUyMloYDzIxMjYxMTA2
MjE0NTIyWjAUMRIwEAYDVQQDDAl0ZXN0LWNhLWIwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAAQSbeLrzZOknBUut8jnBgxWCYwZjSh9L4rLYWitBsEC3x8R5VOMC2sV
vC7RBJ9FRb6g4tqPU4AAg8nEMc4hLOe/o1MwUTAdBgNVHQ4EFgQU/THRrwSUN4fH
reecRx5pa+cmvt0wHwYDVR0jBBgwFoAU/THRrwSUN4fHreecRx5pa+cmvt0wDwYD
VR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNHADBEAiBtxsRIPwEvectd/LBHLWvS
CWu26OYXwKSq/4DcVmh0EgIgfnPeNExgw2yhkQFoc2my8J3kwPlgn/zb4WUeKyxQ
OzY=
-----END CERTIFICATE-----
)";
constexpr char kCertB[] = R"(-----BEGIN CERTIFICATE-----
MIIBiDCCAS6gAwIBAgIUWu1sQpQreW2CEbbnxADzX5VmtzkwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJdGVzdC1jYS1iMCAXDTI2MTEzMDIxNDYwOFoYDzIxMjYxMTA2
MjE0NjA4WjASMRAwDgYDVQQDDAdleHBlcnRkMFkwEwYHKoZIzj0CAQYIKoZIzj0D
AQcDQgAE5D2L4eOsBQJcTaq+wdE6elSBQHMt1f9xTUxAmlJNmZQ2fhAlmpjcmvs5
LjYAuy2sDnGSkqY2PloCvFIOHDHpxaNeMFwwGgYDVR0RBBMwEYcEfwAAAYIJbG9j
YWxob3N0MB0GA1UdDgQWBBS3lPjqKTWD3VrduMaqQYCv4Y2iijAfBgNVHSMEGDAW
gBT9MdGvBJQ3h8et55xHHmlr5ya+3TAKBggqhkjOPQQDAgNIADBFAiApL4ucP1Zz
vzniVDRqC8ltkobCIBoJ3AfH2ejwSIcU7gIhANBU6SBL/cw5oD+oU124dNa09woo
R7D/bTU0P2wV8n0j
-----END CERTIFICATE-----
)";
constexpr char kKeyB[] = R"(-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgis1UPorJcR7331S4
+r3ViHfZ4SuPzSrZxEkNvLazqF+hRANCAATkPYvh46wFAlxNqr7B0Tp6VIFAcy3V
/3FNTECaUk2ZlDZ+ECWamNya+zkuNgC7LawOcZKSpjY+WgK8Ug4cMenF
-----END PRIVATE KEY-----
)";

struct Identity {
  const char* ca;
  const char* cert;
  const char* key;
};
constexpr Identity kA = {kCaA, kCertA, kKeyA};
constexpr Identity kB = {kCaB, kCertB, kKeyB};

// A folder with the three files, removed with the object.
class TlsFolder {
 public:
  explicit TlsFolder(const Identity& identity) {
    char path[] = "/tmp/expertd_tls_XXXXXX";
    path_ = mkdtemp(path);
    Write(identity);
  }
  ~TlsFolder() {
    for (const char* name : {"/ca", "/cert", "/key"}) remove((path_ + name).c_str());
    remove(path_.c_str());
  }
  // Each file is replaced at once, as certificate managers do.
  void Write(const Identity& identity) {
    Replace("/ca", identity.ca);
    Replace("/key", identity.key);
    Replace("/cert", identity.cert);
  }
  rpc::TlsFiles files(bool check_clients) const {
    return {path_ + "/cert", path_ + "/key", check_clients ? path_ + "/ca" : ""};
  }

 private:
  void Replace(const std::string& name, const char* text) {
    std::ofstream(path_ + "/new") << text;
    rename((path_ + "/new").c_str(), (path_ + name).c_str());
  }

  std::string path_;
};

std::unique_ptr<Daemon> StartDaemon(const rpc::TlsFiles& tls, int64_t slot = 0) {
  Config config = DefaultConfig();
  config.listen = "127.0.0.1:0";
  config.slot = slot;
  config.default_backend = "loopback";
  config.tls = tls;
  absl::StatusOr<std::unique_ptr<Daemon>> daemon = Daemon::Create(config);
  EXPECT_TRUE(daemon.ok()) << daemon.status();
  return daemon.ok() ? *std::move(daemon) : nullptr;
}

std::shared_ptr<grpc::ChannelCredentials> Trusting(const Identity& identity, bool show_cert) {
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = identity.ca;
  if (show_cert) {
    options.pem_cert_chain = identity.cert;
    options.pem_private_key = identity.key;
  }
  return grpc::SslCredentials(options);
}

// On a new connection.
std::unique_ptr<v1::ControlService::Stub> Connect(
    const Daemon& daemon, const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return v1::ControlService::NewStub(
      grpc::CreateCustomChannel(daemon.address(), credentials, arguments));
}

absl::StatusOr<v1::GetServerInfoResponse> Info(v1::ControlService::Stub& stub) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + seconds(20));
  v1::GetServerInfoResponse response;
  const absl::Status status = rpc::FromGrpc(stub.GetServerInfo(&context, {}, &response));
  if (!status.ok()) return status;
  return response;
}

absl::Status Reach(const Daemon& daemon,
                   const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
  return Info(*Connect(daemon, credentials)).status();
}

TEST(TlsTest, ServerCertificateIsCheckedByTheCaller) {
  const TlsFolder folder(kA);
  const auto daemon = StartDaemon(folder.files(/*check_clients=*/false));
  ASSERT_NE(daemon, nullptr);
  EXPECT_TRUE(Reach(*daemon, Trusting(kA, false)).ok());
  EXPECT_FALSE(Reach(*daemon, Trusting(kB, false)).ok());
  EXPECT_FALSE(Reach(*daemon, grpc::InsecureChannelCredentials()).ok());
}

TEST(TlsTest, CallersNeedACertificateOfTheAuthority) {
  const TlsFolder folder(kA);
  const auto daemon = StartDaemon(folder.files(/*check_clients=*/true));
  ASSERT_NE(daemon, nullptr);
  EXPECT_TRUE(Reach(*daemon, Trusting(kA, true)).ok());
  EXPECT_FALSE(Reach(*daemon, Trusting(kA, false)).ok());
  EXPECT_FALSE(Reach(*daemon, Trusting({kCaA, kCertB, kKeyB}, true)).ok());
}

TEST(TlsTest, RotatedFilesAreUsedWithoutARestart) {
  TlsFolder folder(kA);
  const auto daemon = StartDaemon(folder.files(/*check_clients=*/true));
  ASSERT_NE(daemon, nullptr);
  ASSERT_TRUE(Reach(*daemon, Trusting(kA, true)).ok());
  folder.Write(kB);
  const SteadyTime deadline = Clock::Real().Now() + seconds(40);
  while (!Reach(*daemon, Trusting(kB, true)).ok()) {
    ASSERT_LT(Clock::Real().Now(), deadline);
    std::this_thread::yield();
  }
  EXPECT_FALSE(Reach(*daemon, Trusting(kA, true)).ok());
}

TEST(TlsTest, DaemonsReachEachOther) {
  const TlsFolder folder(kA);
  std::vector<std::unique_ptr<Daemon>> daemons;
  std::vector<std::unique_ptr<v1::ControlService::Stub>> stubs;
  v1::JoinGroupRequest join;
  for (int64_t slot = 0; slot < 2; ++slot) {
    daemons.push_back(StartDaemon(folder.files(/*check_clients=*/true), slot));
    ASSERT_NE(daemons.back(), nullptr);
    stubs.push_back(Connect(*daemons.back(), Trusting(kA, true)));
    const auto info = Info(*stubs.back());
    ASSERT_TRUE(info.ok()) << info.status();
    v1::Member* member = join.add_members();
    member->set_slot(slot);
    member->set_address(info->address());
    member->set_incarnation(info->incarnation());
  }
  v1::CreateBootstrapIdRequest claim;
  claim.set_group_id("tls");
  claim.set_epoch(1);
  claim.set_claimant("test");
  v1::CreateBootstrapIdResponse claimed;
  grpc::ClientContext claim_context;
  ASSERT_TRUE(stubs[0]->CreateBootstrapId(&claim_context, claim, &claimed).ok());
  join.set_group_id("tls");
  join.set_epoch(1);
  join.set_bootstrap_id(claimed.bootstrap_id());
  join.mutable_config()->set_ep_size(2);
  join.mutable_config()->set_max_tokens_per_rank(8);
  join.mutable_config()->set_max_hidden(8);
  join.mutable_config()->set_max_top_k(1);
  join.mutable_config()->set_max_experts(2);
  join.mutable_config()->set_max_token_dtype(v1::DTYPE_F32);
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&stubs, rank, join]() mutable {
      join.set_rank(rank);
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + seconds(20));
      v1::JoinGroupResponse response;
      const absl::Status status = rpc::FromGrpc(stubs[rank]->JoinGroup(&context, join, &response));
      EXPECT_TRUE(status.ok()) << status;
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace expertd::server
