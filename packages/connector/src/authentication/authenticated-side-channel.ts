import { randomBytes } from "node:crypto";
import {
  type Clock,
  KvError,
  type Log,
  type SideChannel,
  type SideChannelListenOptions,
  type SideChannelReply,
  type SideChannelRequest,
} from "@kv/interface";
import {
  decodeChallenge,
  decodeSignedReply,
  decodeSignedRequest,
  encodeChallenge,
  encodeHandshakeRefusal,
  encodeSignedReply,
  encodeSignedRequest,
  isSignedWith,
} from "@kv/protocol";
import type { HandshakeKeys } from "@kv/side-channel";
import { Challenges } from "./challenges.js";

/** Options of `authenticatedSideChannel`. */
export interface AuthenticatedSideChannelOptions {
  /** Carries the messages. */
  readonly sideChannel: SideChannel;
  /** The first key signs, each is accepted. */
  readonly keys: HandshakeKeys;
  /** Listeners answer only those who prove a key, and requests accept only replies that do. False: requests prove the key where asked. */
  readonly isRequired: boolean;
  /** Times the challenges. */
  readonly clock: Clock;
  /** Gets an entry for each message that is refused. */
  readonly log: Log;
}

/** A challenge that is older is not used: it may have expired at the peer, or another program may have the address. */
const CHALLENGE_MS = 45_000;
const MAX_PEERS = 1024;

/**
 * A side channel whose peers prove that they have a key of `handshake_key_file`, for all messages: handshakes and lease queries. Peers without
 * a key learn nothing but a challenge. A peer gets a message in its own form first, and with a proof only after it has asked for one, so
 * that a vLLM listener never gets a message that it does not know.
 */
export function authenticatedSideChannel(options: AuthenticatedSideChannelOptions): SideChannel {
  const { sideChannel, isRequired } = options;
  const requests = new SignedRequests(options);
  return {
    listen: (given) => sideChannel.listen(isRequired ? answeringProofs(given, options) : given),
    request: (given) => requests.request(given),
    close: () => sideChannel.close(),
  };
}

function answeringProofs(
  given: SideChannelListenOptions,
  { keys, clock, log }: AuthenticatedSideChannelOptions,
): SideChannelListenOptions {
  const challenges = new Challenges({ clock });
  const challenge = () => [
    encodeChallenge(
      challenges.issue(),
      "handshake_key_require is set on this engine, and the message proves no key of handshake_key_file",
    ),
  ];
  return {
    ...given,
    async answer(frames) {
      const signed = decodeSignedRequest(frames);
      if (signed === undefined || !challenges.isValid(signed.challenge)) return challenge();
      const key = keys.current(clock, log).find((each) => isSignedWith(signed, each));
      if (key === undefined || !challenges.use(signed.nonce)) {
        const reason = key === undefined ? "it was signed with another key" : "it was sent before";
        log.debug("side-channel-proof-refused", { reason });
        return [encodeHandshakeRefusal(`the message is refused: ${reason}`)];
      }
      const reply = await given.answer(signed.frames);
      return reply === undefined ? undefined : [encodeSignedReply(reply, signed.nonce, key)];
    },
  };
}

/** The requests of one side channel, with the challenges that peers have sent. */
class SignedRequests {
  readonly #options: AuthenticatedSideChannelOptions;
  readonly #challenges = new Map<string, { readonly challenge: Uint8Array; readonly atMs: number }>();

  constructor(options: AuthenticatedSideChannelOptions) {
    this.#options = options;
  }

  async request(given: SideChannelRequest): Promise<SideChannelReply> {
    const { sideChannel, isRequired } = this.#options;
    let challenge = this.#known(given);
    if (challenge === undefined) {
      const reply = await sideChannel.request(given);
      challenge = this.#remember(given, reply);
      if (challenge === undefined) {
        if (isRequired) throw untrusted(given, "it answers without asking for the key");
        return reply;
      }
    }
    const { nonce, reply } = await this.#signed(given, challenge);
    const again = this.#remember(given, reply);
    if (again === undefined) return this.#checked(given, reply, nonce);
    const second = await this.#signed(given, again);
    return this.#checked(given, second.reply, second.nonce);
  }

  async #signed(given: SideChannelRequest, challenge: Uint8Array) {
    const { sideChannel } = this.#options;
    const nonce = randomBytes(16);
    const frame = encodeSignedRequest({ frames: given.frames, challenge, nonce }, this.#keys()[0] ?? nonce);
    return { nonce, reply: await sideChannel.request({ ...given, frames: [frame] }) };
  }

  #checked(given: SideChannelRequest, reply: SideChannelReply, nonce: Uint8Array): SideChannelReply {
    const frames = decodeSignedReply(reply.frames, nonce, this.#keys());
    if (frames !== undefined) return { ...reply, frames };
    this.#challenges.delete(peerOf(given));
    throw untrusted(given, "its reply is not signed with a key of handshake_key_file");
  }

  #keys(): readonly Uint8Array[] {
    const { keys, clock, log } = this.#options;
    return keys.current(clock, log);
  }

  #known(given: SideChannelRequest): Uint8Array | undefined {
    const known = this.#challenges.get(peerOf(given));
    return known !== undefined && this.#options.clock.now() - known.atMs < CHALLENGE_MS
      ? known.challenge
      : undefined;
  }

  #remember(given: SideChannelRequest, { frames }: SideChannelReply): Uint8Array | undefined {
    const challenge = decodeChallenge(frames);
    const peer = peerOf(given);
    if (challenge === undefined) return undefined;
    this.#challenges.delete(peer);
    this.#challenges.set(peer, { challenge, atMs: this.#options.clock.now() });
    const [oldest] = this.#challenges.keys();
    if (this.#challenges.size > MAX_PEERS && oldest !== undefined) this.#challenges.delete(oldest);
    return challenge;
  }
}

const peerOf = ({ host, port }: SideChannelRequest) => `${host}:${port}`;

function untrusted(given: SideChannelRequest, why: string): KvError {
  return new KvError("KV_HANDSHAKE_UNTRUSTED", `the peer at ${peerOf(given)} is refused: ${why}`, {
    hint: "set handshake_key_file to the same key and handshake_key_require on both sides; plain vLLM cannot prove a key",
  });
}
