import type { Socket } from "node:net";
import {
  type Clock,
  type KvError,
  type LogFields,
  type SideChannel,
  silentLog,
  systemClock,
} from "@kv/interface";
import { leavesNothing } from "@kv/testing/nothing-left";
import { zmqSideChannel } from "../src/zmq-side-channel.js";

export const host = "127.0.0.1";

/** The greeting of a peer without CURVE. */
export const GREETING = Buffer.from(`ff00000000000000017f03014e554c4c${"00".repeat(48)}`, "hex");

export const OWN = Buffer.from("the shared key of this test");
export const OTHER = Buffer.from("another key than that of this test");

/** What a test has opened. Each file closes it by `afterEach(closeAll)`. */
export const closers: (() => unknown)[] = [];

export async function closeAll(): Promise<void> {
  for (const close of closers.splice(0).reverse()) await close();
}

export function own<T extends { close(): void }>(socket: T): T {
  closers.push(() => socket.close());
  return socket;
}

const openSockets = () =>
  process.getActiveResourcesInfo().filter((name) => name.startsWith("TCP")).length;

/** When everything is closed, the test looks for timers and sockets that are left. */
export function leavesNoSocket(timers: () => number, end: () => void = () => {}): void {
  const before = openSockets();
  leavesNothing(
    () => ({ timers: timers(), sockets: Math.max(0, openSockets() - before) }),
    async () => {
      // The system closes them soon.
      for (let turn = 0; turn < 100 && openSockets() > before; turn += 1)
        await new Promise((resolve) => setTimeout(resolve, 10));
      end();
    },
  );
}

type ChannelOptions = NonNullable<Parameters<typeof zmqSideChannel>[0]>;

export function channel({ clock = systemClock(), ...options }: ChannelOptions = {}) {
  const timers = new Set<() => void>();
  const watched: Clock = {
    now: () => clock.now(),
    setTimer(run, delayMs, given) {
      const strike = () => {
        cancel();
        run();
      };
      const timer = clock.setTimer(strike, delayMs, given);
      const cancel = () => {
        timers.delete(strike);
        timer.cancel();
      };
      timers.add(strike);
      return { cancel };
    },
  };
  const made = zmqSideChannel({ ...options, clock: watched });
  closers.push(() => made.close());
  leavesNoSocket(
    () => timers.size,
    () => {
      // A timer may begin another one.
      for (let round = 0; round < 10; round += 1) for (const strike of [...timers]) strike();
    },
  );
  return made;
}

/** Listens on a free port of this host. */
export const listen = (
  side: SideChannel,
  answer: Parameters<SideChannel["listen"]>[0]["answer"] = (frames) => frames,
) => side.listen({ host, port: 0, answer });

/** A side channel that warns into `warnings`; with keys, one that encrypts. */
export function talker(keys?: readonly Uint8Array[], options: ChannelOptions = {}) {
  const warnings: LogFields[] = [];
  const warn = (event: string, fields: LogFields = {}) => void warnings.push({ event, ...fields });
  const made = channel({ log: { ...silentLog, warn }, ...options });
  const side = keys === undefined ? made : made.withEncryption?.(() => keys);
  if (side === undefined) throw new Error("it cannot encrypt");
  const asked: string[] = [];
  const echo = () =>
    listen(side, (frames) => {
      asked.push(Buffer.concat(frames).toString());
      return [Buffer.from("echo"), ...frames];
    });
  const ask = async (port: number, ...frames: string[]) => {
    const sent = frames.map((frame) => Buffer.from(frame));
    const reply = await side.request({ host, port, frames: sent, timeoutMs: 20_000 });
    return reply.frames.map((frame) => Buffer.from(frame).toString());
  };
  return { side, warnings, asked, echo, ask };
}

/** The error that a promise rejects with. */
export const failure = (promise: Promise<unknown>): Promise<KvError> =>
  promise.then(
    () => {
      throw new Error("it did not fail");
    },
    (error: KvError) => error,
  );

/** Resolves when the predicate holds. Checks it on each turn of the event loop. */
export async function until(holds: () => boolean): Promise<void> {
  while (!holds()) await new Promise((resolve) => setImmediate(resolve));
}

/** Resolves when a socket has closed; what it receives is dropped. */
export const closing = (socket: Socket): Promise<void> =>
  new Promise((resolve) => {
    socket
      .on("error", () => {})
      .on("close", () => resolve())
      .resume();
  });
