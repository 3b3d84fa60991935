// Its own entry point: zod loads the texts of fifty languages, and a transport needs none.
import { doctorSchemas } from "@kv/program/doctor-schemas";
import { z } from "zod";

const spreadSchema = z.object({ min: z.number(), median: z.number(), max: z.number() });
/** The least, median and largest of several measurements. */
export type Spread = z.infer<typeof spreadSchema>;

const benchRowSchema = z.object({
  operation: z.enum(["READ", "WRITE"]),
  sizeBytes: z.int().describe("Bytes of one transfer."),
  blockBytes: z.int().describe("Bytes of one descriptor."),
  order: z
    .enum(["contiguous", "scattered"])
    .describe("Order of the blocks; adjacent blocks are merged."),
  rounds: z.int(),
  prepareMs: spreadSchema.describe(
    "From the call to the first post, and the time to make the later requests.",
  ),
  postMs: spreadSchema.describe(
    "Inside the post calls. Nearly everything where the post is the copy.",
  ),
  transferMs: spreadSchema.describe("From the first post to the last byte."),
  totalMs: spreadSchema.describe("From the call until the promise has settled."),
  gigabytesPerSecond: spreadSchema.describe("Computed from totalMs, in units of 10^9 bytes."),
  consistent: z
    .boolean()
    .nullable()
    .describe("Whether SHA-256 of both sides is equal after the transfer; null: not checked."),
});
/** One combination of a benchmark. Times are in ms. */
export type BenchRow = z.infer<typeof benchRowSchema>;

/** What `kv-nixl bench --json` prints. */
export const benchReportSchema = z.object({
  version: z.literal(1),
  target: z.string(),
  backends: z.array(z.string()),
  rows: z.array(benchRowSchema),
});
/** The result of a benchmark. */
export type BenchReport = z.infer<typeof benchReportSchema>;

const schemas = doctorSchemas(
  ["runtime", "library", "plugins", "machine", "variables", "pair"],
  "machine.memlock or plugins.UCX",
);
/** One finding of the doctor, with a stable `id`. */
export type Check = z.infer<typeof schemas.check>;

/** What `kv-nixl doctor --json` prints. */
export const doctorReportSchema = schemas.report;
/** What `doctor` returns: `checks`, their `counts` by status, and the worst as the `verdict`. */
export type DoctorReport = z.infer<typeof doctorReportSchema>;
