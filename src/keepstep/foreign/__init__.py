"""What other programs have written, shown as steps: whoever reads steps reads them unchanged. Nothing in them is run."""
