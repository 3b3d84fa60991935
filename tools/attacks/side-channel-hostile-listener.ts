import { once } from "node:events";
import { createServer, type Socket } from "node:net";
import type { AttackResult } from "./support/attack.js";
import { startVictim, watch } from "./support/attacked-side-channel.js";
import { READY_OF_ROUTER, ZMTP_GREETING } from "./support/zmtp-peer.js";

const KINDS = {
  "frames of 1 MiB with MORE": Buffer.concat([
    Buffer.from("030000000000100000", "hex"),
    Buffer.alloc(2 ** 20),
  ]),
  "empty frames": Buffer.alloc(2 ** 20, Buffer.from([1, 0])),
} as const;

/** A listener that answers each request with `chunk` again and again. */
async function hostileListener(chunk: Buffer) {
  const sockets = new Set<Socket>();
  let sent = 0;
  const server = createServer((socket) => {
    sockets.add(socket);
    socket.write(Buffer.concat([ZMTP_GREETING, READY_OF_ROUTER]));
    const write = () => {
      while (!socket.destroyed) {
        sent += chunk.length;
        if (!socket.write(chunk)) return;
      }
    };
    // The request comes after the greeting and READY.
    let received = 0;
    socket.on("data", (data) => {
      const wasGreeted = received > 104;
      received += data.length;
      if (!wasGreeted && received > 104) write();
    });
    socket
      .on("error", () => {})
      .on("drain", write)
      .on("close", () => sockets.delete(socket));
  }).listen(0, "127.0.0.1");
  await once(server, "listening");
  return {
    port: (server.address() as { port: number }).port,
    sent: () => sent,
    close() {
      for (const socket of sockets) socket.destroy();
      server.close();
    },
  };
}

/**
 * A decode worker is sent to a listener that never ends its replies: three requests for each kind
 * of reply.
 */
export async function run(): Promise<AttackResult> {
  const results: string[] = [];
  let ok = true;
  for (const [name, chunk] of Object.entries(KINDS)) {
    const listener = await hostileListener(chunk);
    const { child, first } = await startVictim("ask", `${listener.port}`);
    await first;
    let refused = 0;
    const seen = await watch(child, async () => {
      refused = await new Promise((resolve) => {
        const limit = setTimeout(() => resolve(0), 60_000);
        child.on("message", (message: { refused?: number }) => {
          if (message.refused === undefined) return;
          clearTimeout(limit);
          resolve(message.refused);
        });
        child.send("begin");
      });
    });
    child.kill("SIGKILL");
    listener.close();
    const sentMiB = Math.round(listener.sent() / 2 ** 20);
    results.push(
      `${name}: ${sentMiB} MiB written, +${seen.grownMiB} MiB, longest stall ${seen.stallMs} ms`,
    );
    ok &&= refused === 3 && seen.grownMiB <= 256 && seen.stallMs <= 2000;
  }
  return {
    attack: "side channel: a hostile listener towards our client",
    tries: "3 requests per kind of reply",
    result: results.join("; "),
    ok,
  };
}
