import { createServer, type Server as NetServer } from "node:net";
import { fileURLToPath } from "node:url";
import {
  experimental,
  loadPackageDefinition,
  Server,
  ServerCredentials,
  type ServiceDefinition,
} from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import { type Certificate, type CertificatePair, ClientConnections, listen } from "@kv/http";
import type { PickerSettings } from "../config/settings.js";

const OPTIONS = { keepCase: true };

export const EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor";
export const HEALTH = "grpc.health.v1.Health";

export function serviceOf(name: typeof EXT_PROC | typeof HEALTH): ServiceDefinition {
  const file = name === EXT_PROC ? "ext_proc.proto" : "health.proto";
  // This file is in `src`, or bundled in `dist`.
  const folder = /\/src\/server\/[^/]+$/.test(import.meta.url) ? "../../proto/" : "../proto/";
  const definition = loadSync(fileURLToPath(new URL(`${folder}${file}`, import.meta.url)), OPTIONS);
  let found: unknown = loadPackageDefinition(definition);
  for (const part of name.split(".")) found = (found as Record<string, unknown>)[part];
  return (found as { readonly service: ServiceDefinition }).service;
}

export function serverCredentials(certificate: Certificate | undefined): ServerCredentials {
  if (certificate === undefined) return ServerCredentials.createInsecure();
  type Listener = (pair: CertificatePair | null) => void;
  const ends = new Map<Listener, () => void>();
  // The first parameter is the server's own certificate, whatever its name.
  return experimental.createCertificateProviderServerCredentials(
    {
      addIdentityCertificateListener(listener: Listener) {
        ends.set(listener, certificate.onChange(listener));
      },
      removeIdentityCertificateListener(listener: Listener) {
        ends.get(listener)?.();
        ends.delete(listener);
      },
      addCaCertificateListener() {},
      removeCaCertificateListener() {},
    },
    null,
    false,
  );
}

/** Bounds the connections of a gRPC server, which `@grpc/grpc-js` does not. */
export class GrpcListener {
  readonly server: Server;
  readonly #net: NetServer;
  readonly #drain: (graceMs: number) => void;

  constructor(
    credentials: ServerCredentials,
    { limits, timeouts }: Pick<PickerSettings, "limits" | "timeouts">,
  ) {
    this.server = new Server({
      "grpc.max_concurrent_streams": limits.requestsPerConnection,
      "grpc.max_receive_message_length": limits.messageLengthBytes,
      "grpc.max_connection_idle_ms": timeouts.idleMs,
      "grpc.keepalive_time_ms": 60_000,
      "grpc.keepalive_timeout_ms": 20_000,
    });
    const injector = this.server.createConnectionInjector(credentials);
    this.#drain = (graceMs) => injector.drain(graceMs);
    const connections = new ClientConnections({
      limits: { ...limits, pipelinedRequests: 0 },
      refuse: (socket) => socket.destroy(),
    });
    this.#net = createServer({ noDelay: true }, (socket) => {
      socket.on("error", () => {});
      if (!connections.accept(socket)) return;
      // It may carry streams, so no connection replaces it. The server ends idle ones.
      connections.received(socket);
      injector.injectConnection(socket);
    });
  }

  /** @throws `KV_CONFIG_INVALID` when the port is taken or the host is not of this machine. */
  listen(host: string, port: number): Promise<number> {
    return listen(this.#net, host, port);
  }

  /** Cancels requests that last longer than `graceMs`. */
  async close(graceMs: number): Promise<void> {
    this.#net.close();
    this.#drain(graceMs);
    const timer = setTimeout(() => this.server.forceShutdown(), graceMs);
    await new Promise<void>((resolve) => this.server.tryShutdown(() => resolve()));
    clearTimeout(timer);
  }
}
