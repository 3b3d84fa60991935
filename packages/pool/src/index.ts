export type { ChangesPage } from "./block-changes.js";
export { BlockFile, type BlockHeader, blockFileName, type Disk } from "./block-file.js";
export { BlockPool, type BlockPoolOptions, type BlockPoolStatus } from "./block-pool.js";
export type { CopierStatus, Engine } from "./copier.js";
export { type NixlDiskOptions, openNixlDisk } from "./nixl-disk.js";
export { type ObjectDiskOptions, type ObjectStore, openObjectDisk } from "./object-disk.js";
export {
  openPool,
  type Pool,
  type PoolContent,
  type PoolOptions,
  type PoolStatus,
} from "./pool.js";
