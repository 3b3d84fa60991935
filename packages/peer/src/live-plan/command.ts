import { KvError } from "@kv/interface";
import { addReportOptions, MAX_RANKS, printReport, type ReportOptions } from "@kv/kv-plan";
import { type HostAndPort, listOf, print, wholeNumberFrom } from "@kv/program";
import type { Command } from "commander";
import {
  addPeerCommand,
  type GroupsOptions,
  givenGroups,
  openSideChannel,
  type SideChannelOptions,
} from "../cli/options.js";
import { kindsOf } from "../protocol/cache-groups.js";
import { livePair } from "./live-pair.js";

interface Options extends ReportOptions, SideChannelOptions, GroupsOptions {
  readonly from: readonly HostAndPort[];
  readonly tp: readonly number[];
  readonly kvHeads?: number | undefined;
  readonly kvCacheDtype?: string | undefined;
  readonly timeout: number;
}

export function addPlan(program: Command): void {
  addReportOptions(addPeerCommand(program, "plan", { sizes: collectSizes })).action(run);
}

async function run(options: Options): Promise<void> {
  const [prefill, decode, ...more] = options.from;
  const [prefillTp, decodeTp = prefillTp, ...moreSizes] = options.tp;
  if (prefill === undefined || decode === undefined || more.length > 0) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `--from is given ${options.from.length} times, expected twice`,
      {
        hint: "kv-peer plan --from PREFILL:5600 --tp 8 --from DECODE:5600 --tp 4",
      },
    );
  }
  if (prefillTp === undefined || decodeTp === undefined || moreSizes.length > 0) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `--tp is given ${options.tp.length} times, expected once or twice`,
      { hint: "give --tp for prefill, then for decode: a handshake does not carry the size" },
    );
  }
  const groups = await givenGroups(options);
  const isMla = groups !== undefined && kindsOf(groups).includes("mla");
  if (options.kvHeads === undefined && !isMla) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      "--kv-heads is missing: a handshake does not carry the KV heads of the model",
      { hint: "give --kv-heads, or --groups mla" },
    );
  }
  await using sideChannel = openSideChannel(options);
  const pair = await livePair({
    sideChannel,
    prefill: { ...prefill, tpSize: prefillTp },
    decode: { ...decode, tpSize: decodeTp },
    numKvHeads: options.kvHeads ?? 1,
    groups,
    cacheDtype: options.kvCacheDtype,
    timeoutMs: options.timeout,
  });
  const plannedFrom = "the engines' handshakes";
  process.exitCode = await printReport({ ...pair, plannedFrom }, options, { stdout: print });
}

function collectSizes(text: string, before: readonly number[] = []): readonly number[] {
  return [...before, ...listOf(wholeNumberFrom(1, MAX_RANKS))(text)];
}
