import type { experimental } from "@grpc/grpc-js";
import type { Certificate, CertificatePair } from "@kv/fleet/front-end";

type Listener = (pair: CertificatePair | null) => void;

/** A certificate as gRPC takes it: each new one is used for the connections that follow. */
export function certificateProvider(certificate: Certificate): experimental.CertificateProvider {
  const ends = new Map<Listener, () => void>();
  return {
    addIdentityCertificateListener(listener: Listener) {
      ends.set(listener, certificate.onChange(listener));
      // The server takes updates only after this call.
      queueMicrotask(() => listener(certificate.pair));
    },
    removeIdentityCertificateListener(listener: Listener) {
      ends.get(listener)?.();
      ends.delete(listener);
    },
    addCaCertificateListener() {},
    removeCaCertificateListener() {},
  };
}
