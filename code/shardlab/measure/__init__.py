"""What is measured: bytes held and sent, operations, seconds; and an emulated slow link."""
