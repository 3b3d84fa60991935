import { positiveNumber, wholeNumberFrom } from "@kv/program";
import { type Command, Option } from "commander";
import type { PoolState } from "./report/sample-request.js";

/**
 * The sample request, what the engines may do for it, and the form of the report.
 * `addReportOptions` defines the flags.
 */
export interface ReportOptions {
  /** `--tokens`: length of the sample request. */
  readonly tokens: number;
  /** `--computed`: logical decode blocks that a prefix hit supplies. */
  readonly computed: number;
  /** `--pool`: whether the block tables of the request are consecutive. */
  readonly pool: PoolState;
  /** `--bandwidth`: of one rank's link, in GB/s. */
  readonly bandwidth: number;
  /** `--permute`: allows the conversion `hnd-to-nhd`. */
  readonly permute: boolean;
  /** `--repack`: allows the conversion `attention-order`. */
  readonly repack: boolean;
  /** `--masked`: the engine masks tokens beyond a request's last. */
  readonly masked: boolean;
  /**
   * `--form`: the form where blocks must be put in another order. @default the one with fewer
   * descriptors
   */
  readonly form?: "permute" | "direct" | undefined;
  /** `--json`: print the report as JSON. One form at most may be given. */
  readonly json: boolean;
  /** `--mermaid`: print a Mermaid flow chart. */
  readonly mermaid: boolean;
  /** `--svg`: print an SVG. */
  readonly svg: boolean;
  /** `--html`: print one self-contained page. */
  readonly html: boolean;
  /** `--kvbench`: print the traffic matrix of NIXL's kvbench. */
  readonly kvbench: boolean;
  /** `--plans`: print the plans of all decode ranks as JSON, one a line. */
  readonly plans: boolean;
  /** `--out`: the file to write to instead of the terminal. */
  readonly out?: string | undefined;
}

const MAX_COUNT = 999_999_999;

/** Adds the flags of `ReportOptions` to a command, and returns the command. */
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
    .option("--mermaid", "print a Mermaid flow chart", false)
    .option("--svg", "print an SVG", false)
    .option("--html", "print one self-contained page", false)
    .option("--kvbench", "print the bytes as a traffic matrix for NIXL's kvbench", false)
    .option("--plans", "print the plans of all decode ranks as JSON, one a line", false)
    .option("--out <file>", "write to a file instead of the terminal");
}

/** A whole number above 0. */
export const integer = wholeNumberFrom(1, MAX_COUNT);
