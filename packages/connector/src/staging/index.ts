export { stagingPoolBlocks } from "./pool-blocks.js";
export { type StagedOptions, staged } from "./staged.js";
export type { StagingCopied } from "./staging-copied.js";
