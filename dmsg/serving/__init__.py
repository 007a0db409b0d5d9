"""What a relay program of any protocol needs: places, rates, queues, a switch, a shell and the service around them."""
