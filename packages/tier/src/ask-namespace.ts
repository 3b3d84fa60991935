import { type AmbientOptions, ambient, KvError } from "@kv/interface";
import { type HandshakeKeys, zmqSideChannel } from "@kv/side-channel";
import { PeerLinks } from "./links.js";
import { decodeMessage, encodeMessage, MESSAGE_LIMITS } from "./messages.js";
import { disconnected, type Namespace } from "./session.js";

/** Options of `askNamespace`. */
export interface AskNamespaceOptions extends AmbientOptions {
  /** The `host:port` of the vLLM server's P2P tier. */
  readonly peerId: string;
  /** The server must be able to dial it. */
  readonly host: string;
  /** @default 30_000 */
  readonly timeoutMs?: number | undefined;
  readonly handshakeKeys?: HandshakeKeys | undefined;
}

/**
 * Asks a vLLM server for the block length, fingerprint and seed that its peers must have. The
 * server gets no metadata, and registers nobody.
 * @throws `KV_PEER_DISCONNECTED`, `KV_REQUEST_TIMEOUT`, `KV_WIRE_MALFORMED`,
 * `KV_SIDE_CHANNEL_BIND_FAILED`.
 */
export async function askNamespace(options: AskNamespaceOptions): Promise<Namespace> {
  const { peerId, host, timeoutMs = 30_000, handshakeKeys } = options;
  const { clock, log } = ambient(options);
  const { maxBytes: maxRequestBytes } = MESSAGE_LIMITS;
  const sideChannel = zmqSideChannel({ clock, log, handshakeKeys, maxRequestBytes });
  let resolve: (namespace: Namespace) => void = () => {};
  let reject: (error: KvError) => void = () => {};
  const announced = new Promise<Namespace>((resolved, rejected) => {
    resolve = resolved;
    reject = rejected;
  });
  announced.catch(() => {});

  const links = new PeerLinks({
    sideChannel,
    host,
    port: 0,
    clock,
    log,
    admits: (from) => from === peerId,
    lost: (_, error) => reject(error),
    receive(_, bytes) {
      try {
        const message = decodeMessage(bytes);
        if (message.type === "connect")
          resolve({
            blockLengthBytes: message.block_len,
            fingerprint: message.config_fingerprint,
            hashSeed: message.hash_seed,
          });
        else reject(disconnected(peerId, "it does not announce itself"));
      } catch (error) {
        reject(KvError.from(error, "KV_WIRE_MALFORMED", "a message of the P2P tier"));
      }
    },
  });
  const timer = clock.setTimer(() => {
    const what = `P2P tier: ${peerId} did not announce itself within ${timeoutMs} ms`;
    reject(
      new KvError("KV_REQUEST_TIMEOUT", what, {
        hint: `it must be able to dial ${host}, and have a secondary tier of type p2p`,
      }),
    );
  }, timeoutMs);
  try {
    await links.listen();
    links.open(peerId);
    links.send(
      peerId,
      encodeMessage({ type: "lookup_resp", kv_request_id: "", keys: [], hits: [] }),
    );
    const namespace = await announced;
    links.send(peerId, encodeMessage({ type: "disconnect" }));
    return namespace;
  } finally {
    timer.cancel();
    await links.closeAll();
    await sideChannel.close();
  }
}
