import { spawn } from "node:child_process";
import { once } from "node:events";
import { createServer } from "node:http";
import { join } from "node:path";
import { listening } from "@kv/testing/http/listening";
import { expect, onTestFinished, test } from "vitest";

const script = join(import.meta.dirname, "../../deploy/base/drain.sh");

/** vLLM's metrics, as version 0.33 writes them. */
const metrics = (running: number, waiting: number) =>
  [
    "# TYPE vllm:num_requests_running gauge",
    `vllm:num_requests_running{engine="0",model_name="m"} ${running}.0`,
    `vllm:num_requests_waiting{engine="0",model_name="m"} ${waiting}.0`,
    'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 7.0',
    "",
  ].join("\n");

async function drain(port: number): Promise<number | null> {
  const env = { ...process.env, PORT: String(port), SETTLE_SECONDS: "0", HOLD_SECONDS: "0" };
  const child = spawn("sh", [script], { env, stdio: "ignore" });
  await once(child, "exit");
  return child.exitCode;
}

test("the preStop script waits for requests that run or wait, and no longer", async () => {
  const states = [metrics(2, 0), metrics(0, 1), metrics(0, 0)];
  let asked = 0;
  const server = createServer((_request, response) => {
    response.end(states[Math.min(asked, states.length - 1)]);
    asked += 1;
  });
  onTestFinished(() => void server.close());
  expect(await drain(await listening(server))).toBe(0);
  expect(asked).toBe(states.length);
});

test("the preStop script ends when vLLM does not answer", async () => {
  expect(await drain(1)).toBe(0);
});
