// The servers of proxy-upstream.ts, with their HTTP in C (c/http-answers.c), whose answers are made
// before: beside a router they take little of the processor and never pause. Argument: their cores.
// Prints {"prefill": port, "decode": port, "sideChannel": port}. The stream of the prompt "hold"
// stays open after its first event until "release\n" arrives on stdin.
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { startSideChannel } from "@kv/testing/http/side-channel";
import { compileC, firstLine, startOnCores } from "./child-processes.js";
import {
  DONE,
  EVENT,
  MODELS,
  prefillAnswer,
  publishEvents,
  RENDERED,
  STREAM,
} from "./upstream-answers.js";

const STREAM_HEAD =
  "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
const LAST_CHUNK = "0\r\n\r\n";
const chunk = (text: string) => `${Buffer.byteLength(text).toString(16)}\r\n${text}\r\n`;
const json = (body: string) =>
  `HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: ${Buffer.byteLength(body)}\r\n\r\n${body}`;

const [cores = "0"] = process.argv.slice(2);
const engineId = `engine-${process.pid}`;
const about = () => ({ engineId, vllmVersion: "0.33.0" });
const { port: sideChannel } = await startSideChannel(about, 0);
const engine = async () => ({
  "/kv_event_sources": json(await publishEvents()),
  "/render": json(RENDERED),
  "/health": json(""),
  "/v1/models": json(MODELS),
});
const program = await compileC("http-answers");

/** Starts a server. Its answers are by the end of a request's path. */
async function start(answers: Readonly<Record<string, string>>) {
  const file = join(mkdtempSync(join(tmpdir(), "kv-bench-")), "answers");
  const lengths = Object.entries(answers).map(
    ([suffix, text]) => `${suffix} ${Buffer.byteLength(text)}\n${text}`,
  );
  writeFileSync(file, lengths.join(""));
  const child = startOnCores(cores, program, [file]);
  const port = Number(await firstLine(child));
  rmSync(dirname(file), { recursive: true });
  return { port, stdin: child.stdin };
}

const prefill = await start({
  ...(await engine()),
  "/v1/completions": json(prefillAnswer(engineId, sideChannel)),
});
const decode = await start({
  ...(await engine()),
  "/v1/completions": `${STREAM_HEAD}${chunk(STREAM)}${LAST_CHUNK}`,
  "#hold": `${STREAM_HEAD}${chunk(EVENT)}`,
  "#release": `${chunk(DONE)}${LAST_CHUNK}`,
});
rmSync(dirname(program), { recursive: true });
const ports = { prefill: prefill.port, decode: decode.port, sideChannel };
process.stdout.write(`${JSON.stringify(ports)}\n`);
process.stdin.pipe(decode.stdin);
process.stdin.on("end", () => process.exit(0));
