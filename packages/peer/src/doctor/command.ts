import { zmqSideChannel } from "@kv/connector";
import { KvError } from "@kv/interface";
import type { Command } from "commander";
import { commaSeparated, count, hostAndPort } from "../option-values.js";
import { reportText } from "../report/text.js";
import { engineServer } from "../server/server.js";
import { bytesInProcess } from "./bytes-process.js";
import { pairDoctor } from "./doctor.js";
import { readTarget } from "./target.js";

interface Options {
  prefill: string;
  decode?: string;
  tp?: number;
  prefillTp?: number;
  decodeTp?: number;
  prefillSideChannel?: { host: string; port: number };
  decodeSideChannel?: { host: string; port: number };
  ask: boolean;
  bytes: boolean;
  limitMib: number;
  write?: true;
  backend?: string[];
  model?: string;
  dtype?: string;
  kvHeads?: number;
  headSize?: number;
  layers?: number;
  timeout: number;
  json?: true;
}

export function addDoctor(program: Command): void {
  program
    .command("doctor")
    .description("say why two servers can or cannot hand KV over; exit code 1 when something fails")
    .requiredOption(
      "--prefill <target>",
      "http://host:port of the server, or host:port of its side channel alone",
    )
    .option("--decode <target>", "the same of the decode server; without it only prefill is looked at")
    .option("--tp <n>", "tensor-parallel size of both, where they do not tell", count)
    .option("--prefill-tp <n>", "of prefill, over what it tells", count)
    .option("--decode-tp <n>", "of decode, over what it tells", count)
    .option("--prefill-side-channel <host:port>", "where prefill does not tell it", hostAndPort)
    .option("--decode-side-channel <host:port>", "where decode does not tell it", hostAndPort)
    .option("--no-ask", "give the servers no prompt of two tokens; they do not tell their side channel then")
    .option("--no-bytes", "read no memory of theirs")
    .option("--limit-mib <n>", "memory to read at most", count, 64)
    .option("--write", "write prefill's null blocks back as they were read")
    .option("--backend <names>", "NIXL backends, separated by commas", commaSeparated)
    .option("--model <name>", "as given to the servers' --model; enters the compatibility hash")
    .option("--dtype <name>", 'of the model, such as "bfloat16"')
    .option("--kv-heads <n>", "KV heads of the model", count)
    .option("--head-size <n>", "of the model", count)
    .option("--layers <n>", "of the model", count)
    .option("--timeout <ms>", "of one handshake", count, 5000)
    .option("--json", "print a JSON report")
    .action(async (options: Options) => {
      const report = await withSideChannel(options);
      process.stdout.write(options.json ? `${JSON.stringify(report, null, 2)}\n` : reportText(report));
      if (report.verdict === "fail") process.exitCode = 1;
    });
}

/** NIXL's own start takes seconds on a busy machine. */
const BYTES_TIMEOUT_MS = 60_000;

async function withSideChannel(options: Options) {
  const sideChannel = zmqSideChannel();
  const { prefillSideChannel, decodeSideChannel } = options;
  const prefillTp = options.prefillTp ?? options.tp;
  const decodeTp = options.decodeTp ?? options.tp;
  try {
    return await pairDoctor({
      prefill: readTarget(options.prefill),
      ...(options.decode === undefined ? {} : { decode: readTarget(options.decode) }),
      sideChannel,
      openServer: (url) => engineServer(url),
      ...(options.bytes ? { moveBytes: (question) => bytesInProcess(question, BYTES_TIMEOUT_MS) } : {}),
      ...(prefillTp === undefined ? {} : { prefillTp }),
      ...(decodeTp === undefined ? {} : { decodeTp }),
      sideChannels: {
        ...(prefillSideChannel === undefined ? {} : { prefill: prefillSideChannel }),
        ...(decodeSideChannel === undefined ? {} : { decode: decodeSideChannel }),
      },
      ask: options.ask,
      factors: factorsOf(options),
      timeoutMs: options.timeout,
      bytes: {
        limitBytes: options.limitMib * 2 ** 20,
        write: options.write === true,
        ...(options.backend === undefined ? {} : { backends: options.backend }),
      },
    });
  } finally {
    await sideChannel.close();
  }
}

function factorsOf({ model, dtype, kvHeads, headSize, layers }: Options): Record<string, unknown> {
  if (dtype !== undefined && !/^(torch\.)?(bfloat16|float16|float32)$/.test(dtype)) {
    throw new KvError("KV_CONFIG_INVALID", `--dtype is "${dtype}", not bfloat16, float16 or float32`);
  }
  return {
    ...(model === undefined ? {} : { model }),
    ...(dtype === undefined ? {} : { dtype: dtype.startsWith("torch.") ? dtype : `torch.${dtype}` }),
    ...(kvHeads === undefined ? {} : { num_kv_heads: kvHeads }),
    ...(headSize === undefined ? {} : { head_size: headSize }),
    ...(layers === undefined ? {} : { num_hidden_layers: layers }),
  };
}
