// P and D whose HTTP is in C, with answers that are made before: they take little of the processor
// and never pause.
import type { ChildProcess } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { startSideChannel } from "@kv/testing/http/side-channel";
import { compileC, firstLine, startOnCores } from "../child-processes.js";
import {
  DONE,
  EVENT,
  MODELS,
  prefillAnswer,
  publishEvents,
  RENDERED,
  STREAM,
} from "../upstream-answers.js";

/** `host:port` of each P and D, and the port of the side channel of all. */
export interface Engines extends AsyncDisposable {
  readonly prefills: readonly string[];
  readonly decodes: readonly string[];
  readonly sideChannel?: number;
  /** A request that they can answer. @default a small one */
  readonly request?: string;
  /** Their prompts share prefixes, which a router may follow. */
  readonly followsPrefixes?: boolean;
}

const json = (body: string, status = "200 OK") =>
  `HTTP/1.1 ${status}\r\ncontent-type: application/json\r\ncontent-length: ${Buffer.byteLength(body)}\r\n\r\n${body}`;
const chunk = (text: string) => `${Buffer.byteLength(text).toString(16)}\r\n${text}\r\n`;
const STREAM_HEAD =
  "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
const LAST_CHUNK = "0\r\n\r\n";
const FIRST = `${STREAM_HEAD}${chunk(EVENT)}`;

/** Of D, by the end of the path, or by `user` in the body: see c/http-answers.c. */
const DECODED = {
  "/v1/completions": `${STREAM_HEAD}${chunk(STREAM)}${LAST_CHUNK}`,
  "#hold": FIRST,
  "#long": FIRST,
  "#event": chunk(EVENT),
  "#release": `${chunk(DONE)}${LAST_CHUNK}`,
};

export type CEngines = Awaited<ReturnType<typeof startEngines>>;

const engineId = `engine-${process.pid}`;
let announced: ReturnType<typeof announce> | undefined;

/** The side channel and the KV events of all engines are this process's. */
async function announce() {
  const about = () => ({ engineId, vllmVersion: "0.33.0" });
  const [{ port }, events] = await Promise.all([startSideChannel(about), publishEvents()]);
  return { sideChannel: port, events };
}

/** As many P as D. */
export async function startEngines(cores: string, pairs = 1) {
  announced ??= announce();
  const [program, { sideChannel, events }] = await Promise.all([
    compileC("http-answers"),
    announced,
  ]);
  const children: ChildProcess[] = [];
  const start = async (answers: Readonly<Record<string, string>>) => {
    const all = {
      ...answers,
      "/kv_event_sources": json(events),
      "/render": json(RENDERED),
      "/health": json(""),
      "/v1/models": json(MODELS),
      "#fail": json('{"error":"no"}', "503 Service Unavailable"),
    };
    const file = join(mkdtempSync(join(tmpdir(), "kv-bench-")), "answers");
    const lengths = Object.entries(all).map(
      ([suffix, text]) => `${suffix} ${Buffer.byteLength(text)}\n${text}`,
    );
    writeFileSync(file, lengths.join(""));
    const child = startOnCores(cores, program, [file]);
    children.push(child);
    const port = await firstLine(child);
    rmSync(dirname(file), { recursive: true });
    return { child, at: `127.0.0.1:${port}` };
  };
  const prefilled = json(prefillAnswer(engineId, sideChannel));
  const each = Array.from({ length: pairs });
  const prefills = await Promise.all(each.map(() => start({ "/v1/completions": prefilled })));
  const decodes = await Promise.all(each.map(() => start(DECODED)));
  rmSync(dirname(program), { recursive: true });
  const say = (child: ChildProcess | undefined, line: string) => child?.stdin?.write(`${line}\n`);
  return {
    prefills: prefills.map(({ at }) => at),
    decodes: decodes.map(({ at }) => at),
    sideChannel,
    engineId,
    /** What becomes of the first P or D. */
    endings: {
      "at 503": (role: "P" | "D") => say((role === "P" ? prefills : decodes)[0]?.child, "fail"),
      killed: (role: "P" | "D") => (role === "P" ? prefills : decodes)[0]?.child.kill("SIGKILL"),
      "ended politely": (role: "P" | "D") =>
        (role === "P" ? prefills : decodes)[0]?.child.stdin?.end(),
    },
    release() {
      for (const { child } of decodes) say(child, "release");
    },
    async [Symbol.asyncDispose]() {
      for (const child of children) child.kill("SIGKILL");
    },
  };
}
