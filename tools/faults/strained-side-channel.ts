import { KvError, type SideChannel } from "@kv/interface";
import { REQUEST_STRAINS, type Strain } from "./strain.js";

/** Long enough for a listener to drop what it cannot read. */
const JUNK_TIMEOUT_MS = 50;

/** A side channel on which questions get lost, answers are noise, and listeners are sent what no peer sends. */
export function strainedSideChannel(sideChannel: SideChannel, strain: Strain): SideChannel {
  const { random } = strain;
  const noise = (lengthBytes: number) => Uint8Array.from({ length: lengthBytes }, () => random.integer(256));
  return {
    ...sideChannel,
    async request(given) {
      const strained = strain.draw("request", REQUEST_STRAINS);
      const where = `${given.host}:${given.port}`;
      if (strained === "unanswered") throw new KvError("KV_SIDE_CHANNEL_TIMEOUT", `${where} was made silent`);
      if (strained === "unreachable")
        throw new KvError("KV_SIDE_CHANNEL_UNREACHABLE", `${where} was cut off`);
      if (strained === "junk") {
        const frames = given.frames.map((frame) => noise(frame.length));
        await sideChannel.request({ ...given, frames, timeoutMs: JUNK_TIMEOUT_MS }).catch(() => {});
      }
      const reply = await sideChannel.request(given);
      if (strained !== "noise") return reply;
      return { ...reply, frames: reply.frames.map((frame) => noise(frame.length)) };
    },
  };
}
