import { KvError, type SideChannel } from "@kv/interface";
import { type FaultInjector, REQUEST_FAULTS } from "./fault-injector.js";

/** Long enough for a listener to drop frames that it cannot decode. */
const JUNK_TIMEOUT_MS = 50;

/**
 * A side channel that loses requests, answers with random bytes, and sends random bytes to
 * listeners.
 */
export function faultySideChannel(sideChannel: SideChannel, injector: FaultInjector): SideChannel {
  const { random } = injector;
  const noise = (lengthBytes: number) =>
    Uint8Array.from({ length: lengthBytes }, () => random.integer(256));
  return {
    ...sideChannel,
    ...(sideChannel.withEncryption === undefined
      ? {}
      : {
          withEncryption: (keys) =>
            faultySideChannel(sideChannel.withEncryption?.(keys) ?? sideChannel, injector),
        }),
    async request(request) {
      const fault = injector.draw("request", REQUEST_FAULTS);
      const where = `${request.host}:${request.port}`;
      if (fault === "unanswered")
        throw new KvError("KV_SIDE_CHANNEL_TIMEOUT", `${where} was made silent`);
      if (fault === "unreachable")
        throw new KvError("KV_SIDE_CHANNEL_UNREACHABLE", `${where} was cut off`);
      if (fault === "junk") {
        const frames = request.frames.map((frame) => noise(frame.length));
        await sideChannel
          .request({ ...request, frames, timeoutMs: JUNK_TIMEOUT_MS })
          .catch(() => {});
      }
      const reply = await sideChannel.request(request);
      if (fault !== "noise") return reply;
      return { ...reply, frames: reply.frames.map((frame) => noise(frame.length)) };
    },
  };
}
