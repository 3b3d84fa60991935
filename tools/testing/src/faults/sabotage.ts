import type { Agent, SideChannel, Transport } from "@kv/interface";
import {
  decodeHandshakeReply,
  decodeLeaseReply,
  encodeHandshakeReply,
  encodeLeaseReply,
} from "@kv/protocol";

/**
 * Rules that a connector must keep, broken from outside: the fault run must detect each.
 * release-early: memory is free as soon as a transfer has failed. trust-stale: every lease reply
 * says that P holds the blocks. wrong-clock: P's clock is one hour slow.
 */
export type Sabotage = "release-early" | "trust-stale" | "wrong-clock";

const ignore = () => {};

export function sabotagedTransport(
  transport: Transport,
  sabotage: Sabotage | undefined,
): Transport {
  if (sabotage !== "release-early") return transport;
  return releasing(transport, (done) => done.then(ignore, ignore));
}

/** Never reports that a transfer's memory is released. `close` still ends the transfers. */
export function neverReleasing(transport: Transport): Transport {
  return releasing(transport, () => new Promise(() => {}));
}

function releasing(
  transport: Transport,
  releasedOf: (done: Promise<unknown>) => Promise<void>,
): Transport {
  return {
    ...transport,
    async createAgent(options) {
      const agent = await transport.createAgent(options);
      const transfer: Agent["transfer"] = (request) => {
        const { done } = agent.transfer(request);
        return { done, released: releasedOf(done) };
      };
      return { ...agent, transfer };
    },
  };
}

export function sabotagedSideChannel(
  sideChannel: SideChannel,
  sabotage: Sabotage | undefined,
): SideChannel {
  if (sabotage !== "trust-stale" && sabotage !== "wrong-clock") return sideChannel;
  return {
    ...sideChannel,
    async request(options) {
      const reply = await sideChannel.request(options);
      const { frames } = reply;
      if (sabotage === "wrong-clock") {
        const [payload] = frames;
        if (payload === undefined || frames.length !== 2) return reply;
        const seconds = decodeHandshakeReply(frames).clockSeconds ?? 0;
        return { ...reply, frames: encodeHandshakeReply(payload, seconds - 3600) };
      }
      const answer = decodeLeaseReply(frames);
      return answer === undefined
        ? reply
        : { ...reply, frames: [encodeLeaseReply({ ...answer, held: true })] };
    },
  };
}
