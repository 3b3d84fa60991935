import { positiveNumber, wholeNumberFrom } from "@kv/program";
import { type Command, Option } from "commander";
import type { PoolState } from "./report/sample-request.js";

/** The sample request and the report's form. `addReportOptions` defines the flags. */
export interface ReportOptions {
  /** `--tokens`: length of the sample request. */
  readonly tokens: number;
  /** `--computed`: logical decode blocks that a prefix hit supplies. */
  readonly computed: number;
  /** `--pool`: whether the request's block ids are consecutive. */
  readonly pool: PoolState;
  /** `--bandwidth` of one rank's link, in GB/s. */
  readonly bandwidth: number;
  /** `--permute`: allows the conversion `hnd-to-nhd`. */
  readonly permute: boolean;
  /** `--repack`: allows the conversion `attention-order`. */
  readonly repack: boolean;
  /** `--masked`: the engine masks tokens beyond a request's last. */
  readonly masked: boolean;
  /**
   * `--form` for blocks that need another order.
   * @default the one with fewer descriptors
   */
  readonly form?: "permute" | "direct" | undefined;
  /** `--json`. At most one form may be given. */
  readonly json: boolean;
  /** `--svg`: an SVG. */
  readonly svg: boolean;
  /** `--html`: one self-contained page. */
  readonly html: boolean;
  /** `--plans`: all decode ranks' plans, one JSON document a line. */
  readonly plans: boolean;
  /** `--out`: the file to write instead of the terminal. */
  readonly out?: string | undefined;
}

const MAX_COUNT = 999_999_999;

/** Adds the flags of `ReportOptions` to a command, and returns it. */
export function addReportOptions(program: Command): Command {
  return program
    .optionsGroup("Sample request:")
    .option("--tokens <count>", "length of the sample request", integer, 2048)
    .option(
      "--computed <blocks>",
      "decode blocks that a prefix hit supplies",
      wholeNumberFrom(0, MAX_COUNT),
      0,
    )
    .addOption(
      new Option("--pool <state>", "how block tables look")
        .choices(["consecutive", "fragmented"])
        .default("consecutive"),
    )
    .option("--bandwidth <GB/s>", "of one rank's link", positiveNumber, 25)
    .optionsGroup("What the engines may do:")
    .option(
      "--permute",
      "allow the conversion of HND to NHD (vLLM: enable_permute_local_kv)",
      false,
    )
    .option(
      "--repack",
      "allow attention backends that differ: the engine repacks the inside of a head",
      false,
    )
    .option("--masked", "the engine masks tokens beyond the last, nothing is zeroed", false)
    .addOption(
      new Option(
        "--form <form>",
        "where blocks must be put in another order (default: fewer descriptors)",
      ).choices(["permute", "direct"]),
    )
    .optionsGroup("Report:")
    .option("--json", "print the report as JSON", false)
    .option("--svg", "print an SVG", false)
    .option("--html", "print one self-contained page", false)
    .option("--plans", "print the plans of all decode ranks as JSON, one a line", false)
    .option("--out <file>", "write to a file instead of the terminal");
}

export const integer = wholeNumberFrom(1, MAX_COUNT);
