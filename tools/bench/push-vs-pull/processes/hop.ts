import { spawn } from "node:child_process";
import { once } from "node:events";
import { connect } from "node:net";
import { performance } from "node:perf_hooks";
import { setTimeout as sleep } from "node:timers/promises";
import { median } from "../../report.js";

const ECHO = `require("net").createServer((socket) => { socket.setNoDelay(); socket.pipe(socket); })
  .listen(0, "127.0.0.1", function () { console.log(this.address().port); });`;
/** Each process of a deployment waits about as long for the next message of a request. */
const IDLE_MS = 10;
const MESSAGES = 200;

/**
 * How long a message to another process of this host takes, in ms, when both have slept: mostly the
 * time to wake a core. Half of a round trip over TCP.
 */
export async function hopMs(): Promise<number> {
  const child = spawn(process.execPath, ["-e", ECHO], { stdio: ["ignore", "pipe", "inherit"] });
  try {
    const [port] = (await once(child.stdout, "data")) as [Buffer];
    const socket = connect(Number(port), "127.0.0.1").setNoDelay();
    await once(socket, "connect");
    const times: number[] = [];
    for (let i = 0; i < MESSAGES; i++) {
      await sleep(IDLE_MS);
      const begun = performance.now();
      socket.write(Buffer.alloc(500));
      await once(socket, "data");
      times.push((performance.now() - begun) / 2);
    }
    socket.destroy();
    return median(times);
  } finally {
    child.kill();
  }
}
